// The texture of what every cell of the cache was in the shown step. It keeps a copy of what it last sent, so that a
// step that changed two columns sends two rows.

import { DataTexture, NearestFilter, RGBAFormat, UnsignedByteType } from "three";
import type { Scene } from "../renderer";

const KINDS = { prompt: 0, generated: 1, special: 2 } as const;
const MOST_ROWS_IN_PARTS = 24;

export class States {
  texture: DataTexture;
  private layers = 0;
  private capacity = 0;
  private data = new Uint8Array(4);

  constructor(private readonly largest: number) {
    this.texture = this.make(1, 1);
  }

  /** Brings the texture up to the scene. Returns whether it is a new one. */
  update(scene: Scene): boolean {
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
    const stride = this.texture.image.width * 4;
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
      if (!renewed && changed.length <= MOST_ROWS_IN_PARTS)
        for (const position of changed) this.texture.addUpdateRange(position * stride, stride);
      else this.texture.clearUpdateRanges();
      this.texture.needsUpdate = true;
    }
    return renewed;
  }

  private make(width: number, height: number): DataTexture {
    this.data = new Uint8Array(width * height * 4);
    const texture = new DataTexture(this.data, width, height, RGBAFormat, UnsignedByteType);
    texture.minFilter = texture.magFilter = NearestFilter;
    texture.generateMipmaps = false;
    texture.needsUpdate = true;
    return texture;
  }
}
