// The patches of the prompt's pictures on their tokens' tiles: a canvas over the renderer's, which says where they are.

import type { Run } from "../run/run";
import type { Renderer } from "./renderers/renderer";

const LARGEST = 44; // CSS pixels
const images = new Map<string, HTMLImageElement>(); // by their URLs
const canvas = document.createElement("canvas");
canvas.className = "patches";
canvas.setAttribute("aria-hidden", "true");

/** `loaded` is called when a picture is there that was not yet. */
export function paint(host: HTMLElement, run: Run | null, renderer: Renderer, loaded: () => void): void {
  if (run === null || run.patches.size === 0) return canvas.remove();
  if (canvas.parentElement !== host) host.append(canvas);
  const ratio = Math.min(devicePixelRatio, 2);
  canvas.width = host.clientWidth * ratio; // and it is empty
  canvas.height = host.clientHeight * ratio;
  const c = canvas.getContext("2d");
  const { first, last } = renderer.window();
  c?.scale(ratio, ratio);
  for (let position = first; position <= last; position++) {
    const patch = run.patches.get(position);
    if (patch === undefined) continue;
    const { picture, row, column } = patch;
    const image = imageOf(picture.url, loaded);
    const [at, next] = [renderer.project(position), renderer.project(position + 1)];
    const side = Math.min(LARGEST, 0.9 * Math.hypot(next.x - at.x, next.y - at.y));
    const [width, height] = [image.naturalWidth / picture.columns, image.naturalHeight / picture.rows];
    if (image.complete)
      c?.drawImage(image, column * width, row * height, width, height, at.x - side / 2, at.y - side / 2, side, side);
  }
}

function imageOf(url: string, loaded: () => void): HTMLImageElement {
  let image = images.get(url);
  if (image === undefined) {
    images.set(url, (image = new Image()));
    image.onload = loaded;
    image.src = url;
  }
  return image;
}
