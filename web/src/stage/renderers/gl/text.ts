// Words in the scene: one instanced quad per word, all from one atlas that is drawn with the browser's own fonts. A
// word is rasterised once, at twice the size or the screen's own resolution, and sent to the GPU row by row; when the
// atlas is full it is begun again with what is in view.

import { SANS } from "../labels";
import type { Word } from "../layout";
import { Part, type Rectangle, Texture } from "./device";
import { FRAGMENT, type FrameUniforms, VERTEX } from "./glsl";

const MOST_WORDS = 320;
const FLOATS = 17;
const SIDE = 1024;
const PAD = 4; // CSS pixels around a word

export class Text {
  readonly part: Part;
  private readonly texture: Texture;
  private readonly pixels = new Uint8Array(SIDE * SIDE * 4);
  private readonly brush: CanvasRenderingContext2D;
  private readonly slots = new Map<string, Rectangle>();
  private readonly widths = new Map<string, number>();
  private readonly data = new Float32Array(MOST_WORDS * FLOATS);
  private scale = 2;
  private shelf = { x: 0, y: 0, height: 0 };
  private added: Rectangle[] = [];
  private anew = true;

  constructor(gl: WebGL2RenderingContext, frame: FrameUniforms) {
    const brush = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    if (!brush) throw new Error("This browser gives no 2-D canvas for the words of the scene.");
    this.brush = brush;
    this.texture = new Texture(gl, this.pixels, SIDE, SIDE, true);
    this.part = new Part(gl, {
      uniforms: { ...frame, uAtlas: { value: this.texture } },
      vertices: { position: [[0, 0, 1, 0, 1, 1, 0, 1], 2] },
      index: [0, 1, 2, 0, 2, 3],
      each: { data: this.data, fields: { place: 4, turn: 4, source: 4, tint: 4, plate: 1 } },
      bothSides: true,
      over: true,
      depth: false,
      vertex: /* glsl */ `${VERTEX}
        in vec2 position;
        in vec4 place; // x, y, width, height
        in vec4 turn; // cosine, sine, alignment
        in vec4 source;
        in vec4 tint;
        in float plate;
        uniform vec2 uSize;
        out vec2 vUv;
        out vec4 vTint;
        out float vPlate;
        void main() {
          vec2 p = (position - turn.zw) * place.zw;
          p = vec2(p.x * turn.x - p.y * turn.y, p.x * turn.y + p.y * turn.x) + place.xy;
          vUv = mix(source.xy, source.zw, position);
          vTint = tint;
          vPlate = plate;
          gl_Position = vec4(p.x / uSize.x * 2.0 - 1.0, 1.0 - p.y / uSize.y * 2.0, 0.0, 1.0);
        }`,
      fragment: /* glsl */ `${FRAGMENT}
        in vec2 vUv;
        in vec4 vTint;
        in float vPlate;
        uniform sampler2D uAtlas;
        void main() {
          vec4 ink = texture(uAtlas, vUv);
          // A glyph with a colour (an emoji) keeps it; the rest takes the word's.
          float own = max(ink.r, max(ink.g, ink.b)) - min(ink.r, min(ink.g, ink.b));
          vec3 c = mix(vTint.rgb * ink.a, ink.rgb, smoothstep(0.05, 0.2, own));
          colour = vec4(c + uPanel * vPlate * (1.0 - ink.a), ink.a + vPlate * (1.0 - ink.a)) * vTint.a;
        }`,
    });
  }

  resolution(ratio: number): void {
    const scale = Math.max(2, ratio);
    if (scale === this.scale) return;
    this.scale = scale;
    this.clear();
  }

  /** Whether the atlas has a row for so wide a text. */
  fits(width: number): boolean {
    return (width + 2 * PAD) * this.scale <= SIDE;
  }

  /** Width of a text in CSS pixels. */
  width(text: string, size: number, bold = false): number {
    const key = `${size}${bold ? "b" : ""}|${text}`;
    let known = this.widths.get(key);
    if (known === undefined) {
      if (this.widths.size > 4000) this.widths.clear();
      this.brush.font = `${bold ? 600 : 400} ${size}px ${SANS}`;
      known = this.brush.measureText(text).width;
      this.widths.set(key, known);
    }
    return known;
  }

  set(words: readonly Word[]): void {
    const shown = words.slice(0, MOST_WORDS);
    let slots = shown.map((word) => this.slot(word));
    if (slots.includes(null)) {
      this.clear();
      slots = shown.map((word) => this.slot(word));
    }
    let count = 0;
    shown.forEach((word, i) => {
      const slot = slots[i];
      if (!slot) return;
      const angle = word.angle ?? 0;
      const [w, h] = [slot.width / this.scale, slot.height / this.scale];
      const [ax, ay] = [word.alignX ?? 0.5, word.alignY ?? 0.5];
      const [r, g, b] = word.colour;
      const at = [
        word.x, word.y, w, h,
        Math.cos(angle), Math.sin(angle), (PAD + ax * (w - 2 * PAD)) / w, ay,
        slot.x / SIDE, slot.y / SIDE, (slot.x + slot.width) / SIDE, (slot.y + slot.height) / SIDE,
        r, g, b, word.alpha ?? 1,
        word.plate ?? 0,
      ]; // prettier-ignore
      this.data.set(at, count++ * FLOATS);
    });
    this.part.instances = count;
    this.part.changed(count * FLOATS);
    this.send();
  }

  private clear(): void {
    this.slots.clear();
    this.shelf = { x: 0, y: 0, height: 0 };
    this.pixels.fill(0);
    this.added = [];
    this.anew = true;
  }

  private slot(word: Word): Rectangle | null {
    const key = `${word.size}${word.bold ? "b" : ""}|${word.text}`;
    const known = this.slots.get(key);
    if (known) return known;
    const { brush, scale, shelf } = this;
    const width = Math.ceil((this.width(word.text, word.size, word.bold) + 2 * PAD) * scale);
    const height = Math.ceil((word.size * 1.3 + 3) * scale);
    if (shelf.x + width > SIDE) this.shelf = { x: 0, y: shelf.y + shelf.height, height: 0 };
    const { x, y } = this.shelf;
    if (y + height > SIDE) return null;
    this.shelf.x += width;
    this.shelf.height = Math.max(this.shelf.height, height);
    const canvas = brush.canvas;
    if (canvas.width < width || canvas.height < height) {
      canvas.width = Math.max(canvas.width, width);
      canvas.height = Math.max(canvas.height, height);
    }
    brush.setTransform(1, 0, 0, 1, 0, 0);
    brush.clearRect(0, 0, width, height);
    brush.setTransform(scale, 0, 0, scale, 0, 0);
    brush.font = `${word.bold ? 600 : 400} ${word.size}px ${SANS}`;
    brush.textBaseline = "middle";
    brush.fillStyle = "#fff";
    brush.fillText(word.text, PAD, height / scale / 2 + 0.5);
    const drawn = brush.getImageData(0, 0, width, height).data;
    for (let row = 0; row < height; row++) {
      const to = ((y + row) * SIDE + x) * 4;
      for (let i = 0; i < width * 4; i += 4) {
        const from = row * width * 4 + i;
        const a = drawn[from + 3] ?? 0;
        for (let k = 0; k < 3; k++) this.pixels[to + i + k] = ((drawn[from + k] ?? 0) * a) / 255;
        this.pixels[to + i + 3] = a;
      }
    }
    const slot = { x, y, width, height };
    this.slots.set(key, slot);
    this.added.push(slot);
    return slot;
  }

  private send(): void {
    if (!this.anew && this.added.length === 0) return;
    this.texture.send(this.anew || this.added.length > 4 ? undefined : this.added);
    this.added = [];
    this.anew = false;
  }

  dispose(): void {
    this.part.dispose();
    this.texture.dispose();
  }
}
