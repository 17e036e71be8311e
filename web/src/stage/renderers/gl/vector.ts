// Places in the scene, and the matrices of its camera: four columns of four numbers, as the shaders take them.

export class Vector3 {
  constructor(
    public x = 0,
    public y = 0,
    public z = 0,
  ) {}

  set(x: number, y: number, z: number): this {
    this.x = x;
    this.y = y;
    this.z = z;
    return this;
  }

  clone = (): Vector3 => new Vector3(this.x, this.y, this.z);

  dot = ({ x, y, z }: Vector3): number => this.x * x + this.y * y + this.z * z;

  /** Adds so many times another. */
  add({ x, y, z }: Vector3, times = 1): this {
    return this.set(this.x + x * times, this.y + y * times, this.z + z * times);
  }

  scale = (by: number): this => this.set(this.x * by, this.y * by, this.z * by);

  /** Where the matrix takes this place, with the division by its depth. */
  through(m: Matrix4): this {
    const { x, y, z } = this;
    const row = (i: number): number => m[i]! * x + m[4 + i]! * y + m[8 + i]! * z + m[12 + i]!;
    return this.set(row(0) / row(3), row(1) / row(3), row(2) / row(3));
  }
}

export const cross = (a: Vector3, b: Vector3): Vector3 =>
  new Vector3(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x);

export type Matrix4 = Float64Array;

export const matrix = (): Matrix4 => new Float64Array(16);

/** What undoes a matrix: Gauss and Jordan, with the identity carried along. */
export function invert(m: Matrix4): Matrix4 {
  const rows = [0, 1, 2, 3].map((r) =>
    [0, 1, 2, 3, 4, 5, 6, 7].map((c) => (c < 4 ? m[4 * c + r]! : Number(c - 4 === r))),
  );
  for (let at = 0; at < 4; at++) {
    const best = rows.slice(at).reduce((a, b) => (Math.abs(b[at]!) > Math.abs(a[at]!) ? b : a));
    rows[rows.indexOf(best)] = rows[at]!;
    rows[at] = best.map((value) => value / best[at]!);
    for (let r = 0; r < 4; r++) {
      const factor = r === at ? 0 : rows[r]![at]!;
      if (factor !== 0) rows[r] = rows[r]!.map((value, c) => value - factor * rows[at]![c]!);
    }
  }
  return Float64Array.from({ length: 16 }, (_, i) => rows[i % 4]![4 + (i >> 2)]!);
}
