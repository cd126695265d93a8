# SPDX-License-Identifier: Apache-2.0
"""Gaussians bound to the triangles of a mesh (SuGaR, section 4.3), put there by one kernel.

Each triangle carries g flat Gaussians at fixed barycentric coordinates; their in-plane size and
rotation, opacity and colour are free. V vertices, F faces, G = F g Gaussians, face by face.

A triangle's frame is turned into a quaternion once; the turn in its plane, by half the angle, is
multiplied to it. In the backward pass the gradient of a unit quaternion q is that of a small turn w
about its own axes, dq = q (0, w) / 2. Turns of all Gaussians of a triangle add up, in its frame
(n, t, b), to (x, y, z), and with the edge e from the second to the first corner and c, whose
direction is n,

    x = b . de / |e|,   y = -b . dc / |c|,   z = -n . de / |e|.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize

from gaussian_splatting.cloud import ANTIALIASED, GaussianCloud, Gaussians, finite_logits
from gaussian_splatting.engine.model import GROUP_NAMES as FREE
from gaussian_splatting.engine.model import STATE_NAMES as FREE_STATE
from gaussian_splatting.engine.model import (
    TrainableModel,
    check_free_state,
    check_shapes,
    cloud_from_state,
    count_gaussians,
    in_float32,
    sh_rest_shape,
)
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.rasterization.spherical_harmonics import rgb_to_sh
from sugar_scene.mesh_normals import CornerSums
from sugar_utils.errors import UserError
from sugar_utils.warp_arrays import Floats, Ints2d, Vec2s, Vec3s, Vec3s2d, Vec4s
from sugar_utils.warp_launch import FUSED_OPTIONS, as_array, launch

wp.set_module_options(FUSED_OPTIONS)

MIN_AREA = 1e-18  # world units squared; below, a triangle has no frame and no turning gradient
_MIN_ITEMS = 256

_VECTORS = {1: None, 2: wp.vec2, 3: wp.vec3, 4: wp.vec4}
MIN_CROSS = 1e-6  # world units squared; shorter cross products are not normalised
MIN_RADIUS = 1e-7
INITIAL_OPACITY = 0.1
SH_REST = 15
_SQRT3 = math.sqrt(3.0)
_MIDDLE = ((1 / 3, 1 / 3, 1 / 3),)
STATE_NAMES = {
    "vertices": "_points",
    "opacity_logits": "all_densities",
    "log_scales": "_scales",
    "rotations": "_quaternions",
    "sh_dc": "_sh_coordinates_dc",
    "sh_rest": "_sh_coordinates_rest",
}
# In the order in which checkpoints list them.
GROUP_NAMES = {
    name: STATE_NAMES[name].removeprefix("_")
    for name in ("vertices", "sh_dc", "sh_rest", "opacity_logits", "log_scales", "rotations")
}
FACES = "_surface_mesh_faces"
THICKNESS = "surface_mesh_thickness"
"""Names of the triangles and of the thickness in a state dict."""
BACKGROUND = "background"
"""Key of a ``.pt`` that holds the background as a model of free Gaussians, with its moments."""
PREFIX = f"{BACKGROUND}_"
_BACKGROUND_CLOCK = 15_000  # iteration of the paper's schedule whose rate its positions have


@wp.struct
class Triangle:
    """A triangle's frame, its first edge's length, and twice its area."""

    first: wp.vec3
    second: wp.vec3
    normal: wp.vec3
    tangent: wp.vec3
    bitangent: wp.vec3
    length: float
    area: float


@wp.func
def triangle_of(face: int, faces: Ints2d, vertices: Vec3s) -> Triangle:
    found = Triangle()
    origin = vertices[faces[face, 0]]
    found.first = vertices[faces[face, 1]] - origin
    found.second = vertices[faces[face, 2]] - origin
    cross = wp.cross(found.first, found.second)
    found.length = wp.length(found.first)
    found.area = wp.length(cross)
    found.normal = wp.vec3(1.0, 0.0, 0.0)
    found.tangent = wp.vec3(0.0, 1.0, 0.0)
    found.bitangent = wp.vec3(0.0, 0.0, 1.0)
    if found.area > wp.static(MIN_AREA):
        found.normal = cross / found.area
        found.tangent = -found.first / found.length
        found.bitangent = wp.normalize(wp.cross(found.normal, found.tangent))
    else:
        found.area = 0.0
    return found


@wp.func
def turn_in_plane(rotation: wp.vec2) -> wp.vec2:
    """Cosine and sine of a complex number's angle."""
    return rotation / wp.max(wp.length(rotation), 1.0e-12)


@wp.func
def half_turn(turn: wp.vec2) -> wp.vec2:
    """Cosine and sine of half the angle."""
    if turn[0] >= 0.0:
        cosine = wp.sqrt(0.5 + 0.5 * turn[0])
        return wp.vec2(cosine, 0.5 * turn[1] / cosine)
    sine = wp.sqrt(0.5 - 0.5 * turn[0])
    return wp.vec2(0.5 * turn[1] / sine, sine)


@wp.kernel
def place_gaussians(
    first: int,
    faces: Ints2d,
    weights: Vec3s,
    thickness: Floats,
    vertices: Vec3s,
    opacity_logits: Floats,
    log_scales: Vec2s,
    rotations: Vec2s,
    means: Vec3s,
    quats: Vec4s,
    scales: Vec3s,
    opacities: Floats,
):
    face = first + wp.tid()
    a = vertices[faces[face, 0]]
    b = vertices[faces[face, 1]]
    c = vertices[faces[face, 2]]
    triangle = triangle_of(face, faces, vertices)
    axes = wp.matrix_from_cols(triangle.normal, triangle.tangent, triangle.bitangent)
    frame = wp.quat_from_matrix(axes)
    for k in range(weights.shape[0]):
        row = face * weights.shape[0] + k
        w = weights[k]
        means[row] = w[0] * a + w[1] * b + w[2] * c
        half = half_turn(turn_in_plane(rotations[row]))
        q = wp.normalize(
            wp.vec4(
                frame[3] * half[0] - frame[0] * half[1],
                frame[3] * half[1] + frame[0] * half[0],
                frame[1] * half[0] + frame[2] * half[1],
                frame[2] * half[0] - frame[1] * half[1],
            )
        )
        if q[0] < 0.0:
            q = -q
        quats[row] = q
        logs = log_scales[row]
        scales[row] = wp.vec3(thickness[0], wp.exp(logs[0]), wp.exp(logs[1]))
        opacities[row] = 1.0 / (1.0 + wp.exp(-opacity_logits[row]))


@wp.kernel
def pull_corners(
    first: int,
    faces: Ints2d,
    weights: Vec3s,
    vertices: Vec3s,
    rotations: Vec2s,
    quats: Vec4s,
    scales: Vec3s,
    opacities: Floats,
    d_means: Vec3s,
    d_quats: Vec4s,
    d_scales: Vec3s,
    d_opacities: Floats,
    d_corners: Vec3s2d,
    d_logits: Floats,
    d_logs: Vec2s,
    d_rotations: Vec2s,
):
    """Gradients of a triangle's Gaussians to their own values and to its corners."""
    face = first + wp.tid()
    triangle = triangle_of(face, faces, vertices)
    d_a = wp.vec3(0.0)
    d_b = wp.vec3(0.0)
    d_c = wp.vec3(0.0)
    d_frame = wp.vec3(0.0)
    for k in range(weights.shape[0]):
        row = face * weights.shape[0] + k
        w = weights[k]
        d_a += w[0] * d_means[row]
        d_b += w[1] * d_means[row]
        d_c += w[2] * d_means[row]
        q = quats[row]
        g = d_quats[row]
        axis = wp.vec3(q[1], q[2], q[3])
        along = wp.vec3(g[1], g[2], g[3])
        pull = 0.5 * (q[0] * along - g[0] * axis - wp.cross(axis, along))
        rotation = rotations[row]
        turn = turn_in_plane(rotation)
        d_frame += wp.vec3(
            pull[0], turn[0] * pull[1] - turn[1] * pull[2], turn[1] * pull[1] + turn[0] * pull[2]
        )
        size = wp.max(wp.length(rotation), 1.0e-12)
        d_rotations[row] = wp.vec2(-turn[1], turn[0]) * (pull[0] / size)
        d_logs[row] = wp.vec2(d_scales[row][1] * scales[row][1], d_scales[row][2] * scales[row][2])
        d_logits[row] = d_opacities[row] * opacities[row] * (1.0 - opacities[row])
    if triangle.area > 0.0:
        u = (d_frame[0] * triangle.bitangent - d_frame[2] * triangle.normal) / triangle.length
        v = triangle.bitangent * (d_frame[1] / triangle.area)
        by_first = wp.cross(v, triangle.second)
        by_second = wp.cross(triangle.first, v)
        d_a += u - by_first - by_second
        d_b += by_first - u
        d_c += by_second
    d_corners[face, 0] = d_a
    d_corners[face, 1] = d_b
    d_corners[face, 2] = d_c


class _Placing(torch.autograd.Function):
    """Vertices, opacity logits, log scales, rotations, :class:`Placement` -> Gaussians' values."""

    @staticmethod
    def forward(ctx, vertices, logits, log_scales, rotations, placement: Placement):
        raw = [value.detach() for value in (vertices, logits, log_scales, rotations)]
        n = len(logits)
        found = tuple(vertices.new_empty(size) for size in ((n, 3), (n, 4), (n, 3), (n,)))
        placement.launch(place_gaussians, placement.thickness, *raw, *found)
        ctx.placement = placement
        ctx.save_for_backward(raw[0], raw[3], *found[1:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        placement, (vertices, rotations, *placed) = ctx.placement, ctx.saved_tensors
        n = len(rotations)
        d_corners = vertices.new_empty(len(placement.faces), 3, 3)
        own = [vertices.new_empty(size) for size in ((n, 1), (n, 2), (n, 2))]
        given = [gradient.contiguous() for gradient in gradients]
        placement.launch(pull_corners, vertices, rotations, *placed, *given, d_corners, *own)
        return placement.sums(d_corners), *own, None


class Placement:
    """Where the Gaussians of a mesh's triangles sit; prepared once, as the topology stays."""

    def __init__(self, cloud: BoundCloud) -> None:
        self.faces = cloud.faces.int().contiguous()
        self._weights = cloud.vertices.new_tensor(cloud.layout.barycentric)
        self.thickness = cloud.thickness.reshape(1)
        self.sums = CornerSums(cloud.faces, len(cloud.vertices))

    def launch(self, kernel: Any, *tensors: Tensor) -> None:
        """Run a kernel over the faces, with rows of up to four numbers."""
        arrays = [self.faces, as_array(self._weights, wp.vec3)]
        for tensor in tensors:
            width = 1 if tensor.dim() == 1 else tensor.shape[-1]
            flat = tensor.view(-1) if width == 1 else tensor
            arrays.append(as_array(flat, _VECTORS[width]))
        launch(kernel, len(self.faces), arrays, min_items=_MIN_ITEMS)


class TriangleLayout(NamedTuple):
    """Where the Gaussians of a triangle sit and how large they start."""

    barycentric: tuple[tuple[float, float, float], ...]
    radius_factor: float


_HALVES, _OUTER, _INNER = (
    ((a, b, b), (b, a, b), (b, b, a)) for a, b in ((1 / 2, 1 / 4), (2 / 3, 1 / 6), (1 / 6, 5 / 12))
)
LAYOUTS = {
    1: TriangleLayout(_MIDDLE, 1 / (2 * _SQRT3)),
    3: TriangleLayout(_HALVES, 1 / (2 * (_SQRT3 + 1))),
    4: TriangleLayout(_MIDDLE + _OUTER, 1 / (4 * _SQRT3)),
    6: TriangleLayout(_OUTER + _INNER, 1 / (4 + 2 * _SQRT3)),
}


@dataclass
class BoundCloud:
    """Raw parameters of mesh-bound Gaussians, in the order in which checkpoints list them."""

    vertices: Tensor  # (V, 3) world units
    sh_dc: Tensor  # (G, 1, 3)
    sh_rest: Tensor  # (G, 15, 3)
    opacity_logits: Tensor  # (G, 1)
    log_scales: Tensor  # in-plane standard deviations, logarithm, (G, 2)
    rotations: Tensor  # in-plane rotation as a complex number, not normalised, (G, 2)
    faces: Tensor  # vertex indices, not optimised, (F, 3) int64
    thickness: Tensor  # standard deviation along the normal, not optimised. Scalar, world units
    background: GaussianCloud | None = None  # free Gaussians of what the mesh does not show
    antialiased: bool = False  # as in :class:`Gaussians`

    def __len__(self) -> int:
        return len(self.opacity_logits) + (0 if self.background is None else len(self.background))

    def to(self, device: torch.device | str) -> BoundCloud:
        movable = {n: v for n, v in vars(self).items() if hasattr(v, "to")}
        return replace(self, **{name: value.to(device) for name, value in movable.items()})

    def tensors(self) -> dict[str, Tensor]:
        """What is optimised, by name; those of the background have a prefix."""
        own = {name: getattr(self, name) for name in GROUP_NAMES}
        free = {} if self.background is None else self.background.tensors()
        return {**own, **{PREFIX + name: tensor for name, tensor in free.items()}}

    @property
    def per_triangle(self) -> int:
        return self.opacity_logits.shape[0] // max(1, self.faces.shape[0])

    @property
    def layout(self) -> TriangleLayout:
        return triangle_layout(self.per_triangle)

    def activate(self, placement: Placement | None = None) -> Gaussians:
        """Place the Gaussians on the mesh; gradients reach all raw parameters."""
        raw = self.vertices, self.opacity_logits, self.log_scales, self.rotations
        placed = _Placing.apply(*raw, placement or Placement(self))
        return Gaussians(*placed, self.sh_dc, self.sh_rest, self.antialiased)

    def activate_all(self, placement: Placement | None = None) -> Gaussians:
        """The Gaussians on the mesh, then those of the background."""
        bound = self.activate(placement)
        return bound if self.background is None else bound.joined(self.background.activate())

    @torch.no_grad()
    def to_gaussians(self) -> GaussianCloud:
        """The same Gaussians without their mesh, as any 3DGS program takes them."""
        placed = self.activate()
        same = ("sh_dc", "sh_rest", "opacity_logits")
        bound = GaussianCloud(
            means=placed.means,
            log_scales=placed.scales.log(),
            quats=placed.quats,
            **{name: getattr(self, name).detach() for name in same},
            antialiased=self.antialiased,
        )
        return bound if self.background is None else bound.joined(self.background.detached())


def triangle_layout(per_triangle: int) -> TriangleLayout:
    if per_triangle not in LAYOUTS:
        raise UserError(
            f"{per_triangle} Gaussians per triangle are not supported; "
            f"--gaussians_per_triangle takes {', '.join(map(str, LAYOUTS))}"
        )
    return LAYOUTS[per_triangle]


def bind_to_mesh(
    vertices: Tensor,
    faces: Tensor,
    vertex_colors: Tensor,
    per_triangle: int,
    extent: float,
    opacity: float = INITIAL_OPACITY,
) -> BoundCloud:
    """Initial Gaussians on a mesh; their thickness is a millionth of the camera extent."""
    layout = triangle_layout(per_triangle)
    if faces.shape[0] == 0:
        raise UserError("the mesh has no triangles to bind Gaussians to; extract it again")
    faces = faces.long()
    triangles = vertices.float()[faces]
    edges = triangles - triangles.roll(1, dims=1)
    shortest = edges.norm(dim=-1).amin(dim=-1).repeat_interleave(per_triangle)
    radius = (layout.radius_factor * shortest).clamp_min(MIN_RADIUS)
    weights = triangles.new_tensor(layout.barycentric)
    colors = torch.einsum("kc,fcd->fkd", weights, vertex_colors.float()[faces]).reshape(-1, 1, 3)
    n = radius.shape[0]
    rotations = radius.new_zeros(n, 2)
    rotations[:, 0] = 1.0
    return BoundCloud(
        vertices=vertices.float().clone(),
        sh_dc=rgb_to_sh(colors),
        sh_rest=radius.new_zeros(n, SH_REST, 3),
        opacity_logits=torch.logit(radius.new_full((n, 1), opacity)),
        log_scales=radius.log()[:, None].expand(n, 2).clone(),
        rotations=rotations,
        faces=faces,
        thickness=radius.new_tensor(extent / 1e6),
    )


def face_normals(triangles: Tensor) -> Tensor:
    """Unit normals by the order of the corners. (F, 3, 3) -> (F, 3); zero for degenerate ones."""
    a, b, c = triangles.unbind(1)
    cross = torch.linalg.cross(b - a, c - a)
    return normalize(cross / cross.norm(dim=-1, keepdim=True).clamp_min(MIN_CROSS), dim=-1)


def face_frames(triangles: Tensor) -> Tensor:
    """Normal, direction from corner 2 to 1, and their product as columns. (F, 3, 3) -> (F, 3, 3)"""
    normal = face_normals(triangles)
    tangent = normalize(triangles[:, 0] - triangles[:, 1], dim=-1)
    bitangent = normalize(torch.linalg.cross(normal, tangent), dim=-1)
    return torch.stack([normal, tangent, bitangent], dim=-1)


class TrainableBoundCloud(TrainableModel):
    """Mesh-bound Gaussians on fixed faces, and the free ones of a background.

    ``vertex_scale`` scales the rate of vertices, ``extent`` that of the background's positions.
    """

    state_names = STATE_NAMES
    group_names = GROUP_NAMES

    def __init__(
        self,
        cloud: BoundCloud,
        rates: LearningRates,
        vertex_scale: float,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        seed: int = 0,
        extent: float = 1.0,
    ) -> None:
        by_name = rates.by_name(0, vertex_scale)
        same = {"vertices": "means", "rotations": "quats"}
        own_rates = {name: by_name[same.get(name, name)] for name in GROUP_NAMES}
        if cloud.background is not None:
            self.group_names = {**GROUP_NAMES, **{PREFIX + name: n for name, n in FREE.items()}}
            free_rates = rates.by_name(_BACKGROUND_CLOCK, extent)
            own_rates |= {PREFIX + name: rate for name, rate in free_rates.items()}
        super().__init__(cloud.tensors(), own_rates, optimizer, seed)
        # The optimiser has copies of its own; of the start only faces and thickness are kept.
        nothing = cloud.thickness.new_empty(0)
        self._start = replace(cloud, **dict.fromkeys(GROUP_NAMES, nothing), background=None)
        self._rates = rates
        self._vertex_scale = vertex_scale

    def __len__(self) -> int:
        return len(self.cloud)

    @property
    def cloud(self) -> BoundCloud:
        own = {name: self.optimizer.parameters[name] for name in GROUP_NAMES}
        return replace(self._start, **own, background=self._background)

    @property
    def _background(self) -> GaussianCloud | None:
        parameters = self.optimizer.parameters
        if PREFIX + "means" not in parameters:
            return None
        tensors = {name: parameters[PREFIX + name] for name in FREE}
        return GaussianCloud(**tensors, antialiased=self._start.antialiased)

    def buffers(self) -> dict[str, Tensor]:
        return {FACES: self._start.faces.int(), THICKNESS: self._start.thickness}

    def schedule_vertex_rate(self, iteration: float) -> None:
        rate = self._rates.position(iteration, self._vertex_scale)
        self.optimizer.set_learning_rate("vertices", rate)

    def state(self) -> dict[str, Any]:
        """As of every model; the background is apart, where other readers do not look."""
        state = super().state()
        free = self._background
        state |= {ANTIALIASED: True} if self._start.antialiased else {}
        if free is None:
            return state
        optimizer = state["optimizer_state_dict"]
        n = len(GROUP_NAMES)
        moments = optimizer["state"]
        groups = optimizer["param_groups"]
        own = {"state": {i: m for i, m in moments.items() if i < n}, "param_groups": groups[:n]}
        rest = {
            "state": {i - n: m for i, m in moments.items() if i >= n},
            "param_groups": [{**group, "params": [i]} for i, group in enumerate(groups[n:])],
        }
        values = {file: in_float32(getattr(free, name)) for name, file in FREE_STATE.items()}
        background = {"state_dict": values, "optimizer_state_dict": rest}
        return {**state, "optimizer_state_dict": own, BACKGROUND: background}

    def restore(self, payload: dict[str, Any]) -> None:
        free = payload.get(BACKGROUND)
        n = len(GROUP_NAMES)
        if (free is None) != (self._background is None):
            raise UserError("the checkpoint was made with another --keep_background")
        if free is None:
            super().restore(payload)
            return
        own = payload["optimizer_state_dict"]
        rest = free["optimizer_state_dict"]
        moments = {**own["state"], **{n + i: m for i, m in rest["state"].items()}}
        saved = zip(self.group_names, own["param_groups"] + rest["param_groups"], strict=True)
        groups = [{**g, "name": name, "params": [i]} for i, (name, g) in enumerate(saved)]
        both = {"state": moments, "param_groups": groups}
        values = state_with_background(payload)
        super().restore({"state_dict": values, "optimizer_state_dict": both})

    def tensors_of(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Parameters of bound Gaussians on the same mesh topology, and of the background."""
        saved = bound_cloud_from_state(state)
        if saved.faces.shape != self._start.faces.shape:
            raise UserError(
                f"the checkpoint's mesh has {saved.faces.shape[0]} triangles, this run's "
                f"{self._start.faces.shape[0]}; continue with the mesh it was made with"
            )
        return saved.tensors()


def state_with_background(payload: dict[str, Any]) -> dict[str, Any]:
    """The ``state_dict`` of a ``.pt`` with its background and whether it is antialiased."""
    state = payload["state_dict"]
    free = payload.get(BACKGROUND)
    antialiased = {ANTIALIASED: True} if payload.get(ANTIALIASED) else {}
    return {**state, **antialiased, **({} if free is None else {BACKGROUND: free["state_dict"]})}


def check_bound_state(state: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` where mesh and bound Gaussians do not fit each other."""
    n = count_gaussians({"state_dict": state})
    shapes = {
        "all_densities": (n, 1),
        "_scales": (n, 2),
        "_quaternions": (n, 2),
        "_sh_coordinates_dc": (n, 1, 3),
        "_sh_coordinates_rest": sh_rest_shape(state, n),
    }
    check_shapes(state, shapes)
    if n == 0:
        raise ValueError("there are no Gaussians")
    points = state["_points"]
    faces = state[FACES]
    thickness = state[THICKNESS]
    if points.dim() != 2 or points.shape[1] != 3 or not points.is_floating_point():
        raise ValueError(f"_points has shape {tuple(points.shape)}, expected (V, 3)")
    if faces.is_floating_point() or faces.dim() != 2 or faces.shape[1] != 3 or not len(faces):
        raise ValueError(f"{FACES} is no list of triangles")
    if not 0 <= int(faces.min()) <= int(faces.max()) < len(points):
        raise ValueError(f"{FACES} names vertices that are not there")
    if thickness.numel() != 1 or float(thickness) < 0:
        raise ValueError(f"{THICKNESS} is no thickness")


def check_bound_payload(payload: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where a checkpoint is none of a refined model."""
    state = payload["state_dict"]
    missing = [name for name in (FACES, THICKNESS, *STATE_NAMES.values()) if name not in state]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    check_bound_state(state)
    if payload.get(BACKGROUND) is not None:
        check_free_state(payload[BACKGROUND]["state_dict"])


def bound_cloud_from_state(state: dict[str, Any]) -> BoundCloud:
    """Build the mesh and its Gaussians of a refined model, with its background if it has one.

    Raises:
        UserError: Tensors are missing, or do not fit each other.
    """
    missing = [name for name in (FACES, THICKNESS, *STATE_NAMES.values()) if name not in state]
    if missing:
        raise UserError(f"the checkpoint lacks {', '.join(missing)}: not a refined SuGaR model")
    try:
        check_bound_state(state)
    except ValueError as error:
        raise UserError(f"the checkpoint makes no sense ({error}); use an earlier one") from error
    is_antialiased = ANTIALIASED in state
    background = None
    if BACKGROUND in state:
        background = replace(cloud_from_state(state[BACKGROUND]), antialiased=is_antialiased)
    tensors = {}
    for name, file_name in STATE_NAMES.items():
        tensors[name] = state[file_name].float().contiguous()
    tensors["opacity_logits"] = finite_logits(tensors["opacity_logits"])
    cloud = BoundCloud(
        **tensors,
        faces=state[FACES].long(),
        thickness=state[THICKNESS].float(),
        background=background,
        antialiased=is_antialiased,
    )
    n_faces = cloud.faces.shape[0]
    n_gaussians = cloud.opacity_logits.shape[0]
    if n_gaussians % n_faces:
        raise UserError(f"the checkpoint has {n_gaussians} Gaussians on {n_faces} triangles")
    triangle_layout(cloud.per_triangle)
    return cloud
