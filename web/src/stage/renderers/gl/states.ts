// The texture of what every cell of the cache was in the shown step. It keeps a copy of what it last sent, so that a
// step that changed two columns sends two rows.

import type { Scene } from "../renderer";
import { Texture } from "./device";

const KINDS = { prompt: 0, generated: 1, special: 2 } as const;
const MOST_ROWS_IN_PARTS = 24;

export class States {
  texture: Texture;
  private layers = 0;
  private capacity = 0;
  private data = new Uint8Array(4);
  private sent: Scene | null = null;

  constructor(
    private readonly gl: WebGL2RenderingContext,
    private readonly largest: number,
  ) {
    this.texture = this.make(1, 1);
  }

  /** Brings the texture up to the scene. Returns whether it is a new one. */
  update(scene: Scene): boolean {
    if (scene === this.sent) return false; // another picture of its animation
    this.sent = scene;
    const tokens = Math.min(scene.tokens.length, this.largest);
    const renewed = scene.layers !== this.layers || tokens > this.capacity;
    if (renewed) {
      this.texture.dispose();
      let capacity = 64;
      while (capacity < tokens) capacity *= 2;
      this.capacity = Math.min(capacity, this.largest);
      this.layers = scene.layers;
      this.texture = this.make(Math.ceil((scene.layers + 1) / 4), this.capacity);
    }
    const stride = this.texture.width * 4;
    const changed: number[] = [];
    for (let position = 0; position < tokens; position++) {
      const at = position * stride;
      const from = position * scene.layers;
      const kind = KINDS[scene.tokens[position]?.kind ?? "prompt"];
      let same = this.data[at] === kind;
      for (let layer = 0; same && layer < scene.layers; layer++)
        same = this.data[at + 1 + layer] === (scene.cells[from + layer] ?? 0);
      if (same) continue;
      this.data[at] = kind;
      for (let layer = 0; layer < scene.layers; layer++) this.data[at + 1 + layer] = scene.cells[from + layer] ?? 0;
      changed.push(position);
    }
    if (changed.length > 0) {
      const { width } = this.texture;
      const few = !renewed && changed.length <= MOST_ROWS_IN_PARTS;
      this.texture.send(few ? changed.map((y) => ({ x: 0, y, width, height: 1 })) : undefined);
    }
    return renewed;
  }

  private make(width: number, height: number): Texture {
    this.data = new Uint8Array(width * height * 4);
    return new Texture(this.gl, this.data, width, height, false);
  }
}
