#!/usr/bin/env bash
# Carries what benchmarks/gpu/check.py needs to a GPU machine without network, in small parts.
#
#   benchmarks/pack_for_gpu.sh pack FOLDER [PYTHON [PACKAGE...]]
#       Where there is a network: fetch packages for that version of Python (default 3.12) on Linux,
#       and write FOLDER/site.00, site.01, ... of at most 45 MiB each, with their checksums.
#       Without PACKAGE what check.py imports: requirements-without-torch.txt without Open3D, the
#       viewer, videos and texture atlases of xatlas. HAVE=FILE names packages that the machine has,
#       as "pip freeze" writes them there; they are left out. LEVEL=9 makes parts that are a fifth
#       smaller in twice the time.
#   benchmarks/pack_for_gpu.sh unpack FOLDER SITE
#       There, with Python alone: check the parts and unpack them. Then, in this repository:
#       PYTHONPATH=SITE python benchmarks/gpu/check.py --json gpu.json
#
# PyTorch with CUDA must be there. Shared libraries make up most of it; the filter for x86 code and
# one dictionary for all of them bring Warp's 336 MiB to 97, at LEVEL=9 to 75.
set -euo pipefail

PART=45M
LEVEL=${LEVEL:-2}
NOT_IMPORTED='^(open3d|viser|av|xatlas|trimesh)\b'
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v python3 || command -v python)

usage() {
    sed -n '2,16p' "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
}

pack() {
    local folder=$1 version=${2:-3.12} work
    shift $(($# > 2 ? 2 : $#))
    for tool in xz split sha256sum; do
        command -v "$tool" >/dev/null || { echo "$tool is missing; install it" >&2; exit 2; }
    done
    work=$(mktemp -d)
    # Expanded now: the variable is gone when the script ends.
    trap "rm -rf '$work'" EXIT
    if (($#)); then
        printf '%s\n' "$@" >"$work/wanted.txt"
    else
        grep -vE "$NOT_IMPORTED" "$root/requirements-without-torch.txt" >"$work/wanted.txt"
    fi
    local platforms=()
    for name in manylinux_2_34 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${name}_x86_64")
    done
    "$python" -m pip install --quiet --only-binary=:all: --implementation cp \
        --python-version "$version" "${platforms[@]}" --target "$work/site" -r "$work/wanted.txt"
    find "$work/site" -name __pycache__ -prune -exec rm -rf {} +
    if [ -n "${HAVE:-}" ]; then leave_out "$work/site" "$HAVE"; fi
    mkdir -p "$folder"
    rm -f "$folder"/site.* "$folder"/checksums
    tar -C "$work/site" -cf - --sort=name . |
        xz -T0 --x86 --lzma2="preset=$LEVEL,dict=128MiB" |
        split -b "$PART" -d - "$folder/site."
    (cd "$folder" && sha256sum site.* >checksums)
    ls -lh "$folder" >&2
}

# Removes the files of packages that the machine has. Arguments: the folder, names of packages.
leave_out() {
    "$python" - "$1" "$2" <<'PYTHON'
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

site, have = map(Path, sys.argv[1:])
lines = have.read_text(encoding="utf-8").splitlines()
names = {re.sub("[-_.]+", "-", re.split("[=<>@ ;]", line)[0]).lower() for line in lines if line}
for package in distributions(path=[str(site)]):
    if re.sub("[-_.]+", "-", package.metadata["Name"]).lower() in names:
        for file in package.files or ():
            path = Path(package.locate_file(file))
            # Scripts and manual pages lie beside the packages.
            if path.resolve().is_relative_to(site.resolve()):
                path.unlink(missing_ok=True)
PYTHON
}

unpack() {
    "$python" - "$1" "$2" <<'PYTHON'
import hashlib
import io
import sys
import tarfile
from pathlib import Path

folder, site = map(Path, sys.argv[1:])


def stop(problem: str) -> None:
    print(problem, file=sys.stderr)
    sys.exit(2)


if not (folder / "checksums").is_file():
    stop(f"{folder}: no checksums; copy all that pack has written")
parts = [line.split() for line in (folder / "checksums").read_text().splitlines()]
for expected, name in parts:
    if not (folder / name).is_file():
        stop(f"{folder / name}: missing; copy all that pack has written")
    if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
        stop(f"{folder / name}: damaged on the way; copy it again")
whole = io.BytesIO(b"".join((folder / name).read_bytes() for _, name in parts))
with tarfile.open(fileobj=whole, mode="r:xz") as archive:
    archive.extractall(site, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
print(f"PYTHONPATH={site.resolve()} python benchmarks/gpu/check.py --json gpu.json")
PYTHON
}

case "${1:-}" in
pack) (($# >= 2)) || usage; shift; pack "$@" ;;
unpack) (($# == 3)) || usage; shift; unpack "$@" ;;
*) usage ;;
esac
