// SPDX-License-Identifier: Apache-2.0
/*!
 * Contains Spark 2.2.0, three.js 0.180.0 and fflate, under the MIT License:
 *
 * Copyright (c) 2025 WORLD LABS TECHNOLOGIES, INC.
 * Copyright (c) 2010-2025 three.js authors
 * Copyright (c) 2026 Arjun Barrett
 *
 * Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
 * associated documentation files (the "Software"), to deal in the Software without restriction,
 * including without limitation the rights to use, copy, modify, merge, publish, distribute,
 * sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
 * furnished to do so, subject to the following conditions:
 *
 * The above copyright notice and this permission notice shall be included in all copies or
 * substantial portions of the Software.
 *
 * THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
 * NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
 * NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
 * DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
 * OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
 */

// The page of a scan: its mesh and its Gaussians side by side, under one camera.

import { SparkRenderer, SplatMesh } from "@sparkjsdev/spark";
import * as THREE from "three";
import { OrbitControls } from "three/addons/controls/OrbitControls.js";
import { GLTFLoader } from "three/addons/loaders/GLTFLoader.js";

const FIELD_OF_VIEW = 45; // degrees

/** Returns the bytes that an element holds in base64. */
function bytesOf(id) {
  const text = atob(document.getElementById(id).textContent.trim());
  return Uint8Array.from(text, (letter) => letter.charCodeAt(0));
}

/** Places a camera in front of a mesh, a little above it, so that all of it is in view. */
function lookAt(mesh, camera, controls) {
  const box = new THREE.Box3().setFromObject(mesh);
  const center = box.getCenter(new THREE.Vector3());
  const radius = box.getSize(new THREE.Vector3()).length() / 2;
  const distance = radius / Math.sin(THREE.MathUtils.degToRad(FIELD_OF_VIEW / 2));
  const direction = new THREE.Vector3(0, 0.5, 1).normalize();
  camera.position.copy(center).addScaledVector(direction, distance);
  camera.near = distance / 1000;
  camera.far = distance * 1000;
  controls.target.copy(center);
  controls.update();
}

/** Returns the scenes that a choice of the page shows, from left to right. */
function visible(scenes) {
  const choice = document.body.dataset.show;
  return choice === "both" ? [scenes.mesh, scenes.gaussians] : [scenes[choice]];
}

async function start() {
  const canvas = document.querySelector("canvas");
  const renderer = new THREE.WebGLRenderer({ canvas, antialias: true });
  renderer.setPixelRatio(Math.min(window.devicePixelRatio, 2));
  renderer.setScissorTest(true);
  const camera = new THREE.PerspectiveCamera(FIELD_OF_VIEW, 1);
  const controls = new OrbitControls(camera, canvas);
  const scenes = { mesh: new THREE.Scene(), gaussians: new THREE.Scene() };
  // Only meshes that were exported to be lit have materials that lights change.
  scenes.mesh.add(new THREE.HemisphereLight(0xffffff, 0x888888, 3));
  scenes.gaussians.add(new SparkRenderer({ renderer }));
  const model = await new GLTFLoader().parseAsync(bytesOf("mesh").buffer, "");
  scenes.mesh.add(model.scene);
  lookAt(model.scene, camera, controls);
  const splats = new SplatMesh({ fileBytes: bytesOf("gaussians"), fileName: "gaussians.spz" });
  scenes.gaussians.add(splats);
  await splats.initialized;
  for (const button of document.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      document.body.dataset.show = button.dataset.show;
    });
  }
  renderer.setAnimationLoop(() => {
    const height = canvas.clientHeight;
    const views = visible(scenes);
    const width = canvas.clientWidth / views.length;
    // The canvas gets a new buffer each time, so only where its size has changed.
    const size = renderer.getSize(new THREE.Vector2());
    if (size.x !== canvas.clientWidth || size.y !== height) {
      renderer.setSize(canvas.clientWidth, height, false);
    }
    camera.aspect = width / height;
    camera.updateProjectionMatrix();
    controls.update();
    views.forEach((scene, number) => {
      renderer.setViewport(number * width, 0, width, height);
      renderer.setScissor(number * width, 0, width, height);
      renderer.render(scene, camera);
    });
    document.body.dataset.gaussians = splats.numSplats;
  });
}

start().catch((error) => {
  document.querySelector("p").textContent = `This browser cannot show the scan: ${error.message}`;
});
