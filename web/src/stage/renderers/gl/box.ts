// A unit box (x and z from -0.5 to 0.5, y from 0 to 1) with the number of its face at each corner: 0 top, 1 front and
// back, 2 the sides, 3 the bottom. Tiles and columns are instances of it; 12 triangles.

export function box() {
  const corners: number[] = [];
  const faces: number[] = [];
  const index: number[] = [];
  const side = (face: number, a: number[], b: number[], c: number[], d: number[]) => {
    const first = corners.length / 3;
    corners.push(...a, ...b, ...c, ...d);
    faces.push(face, face, face, face);
    index.push(first, first + 1, first + 2, first, first + 2, first + 3);
  };
  const [l, r, f, k] = [-0.5, 0.5, 0.5, -0.5]; // left, right, front, back
  side(0, [l, 1, f], [r, 1, f], [r, 1, k], [l, 1, k]);
  side(1, [l, 0, f], [r, 0, f], [r, 1, f], [l, 1, f]);
  side(1, [r, 0, k], [l, 0, k], [l, 1, k], [r, 1, k]);
  side(2, [r, 0, f], [r, 0, k], [r, 1, k], [r, 1, f]);
  side(2, [l, 0, k], [l, 0, f], [l, 1, f], [l, 1, k]);
  side(3, [l, 0, k], [r, 0, k], [r, 0, f], [l, 0, f]);
  return { vertices: { position: [corners, 3], face: [faces, 1] }, index } as const;
}
