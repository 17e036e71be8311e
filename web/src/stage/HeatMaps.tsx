// The shown attention row on the prompt's pictures: each cell is a token, in the beam's colour by its weight. All
// pictures have one scale.

import { run, hovered } from "../visit/store";
import { percent } from "../ui/format";
import type { AttentionRow, PictureCard } from "../schema";

export { paint } from "./patches";

const DENSEST = 0.8; // of the largest weight: the picture stays visible under it

const weight = (code = 0): number => (code / 255) ** 2; // as `WEIGHTS`: its module stays with the stage's

export function HeatMaps({ row }: { row: AttentionRow }) {
  const current = run.value;
  if (current === null || current.patches.size === 0) return null;
  const codes = [...current.patches.keys()].map((position) => row.codes[position] ?? 0);
  const most = Math.max(1, ...codes);
  const share = codes.reduce((sum, code) => sum + weight(code), 0);
  return (
    <>
      <div class="heat-maps">
        {current.card.pictures.map((picture, i) => (
          <HeatMap key={i} picture={picture} number={i + 1} row={row} most={most} />
        ))}
      </div>
      <p class="under">
        {current.called(row.codes.length - 1)} gives the pictures {percent(share)} of its weight
      </p>
    </>
  );
}

interface Shown {
  picture: PictureCard;
  number: number;
  row: AttentionRow;
  most: number; // of all codes
}

function HeatMap({ picture, number, row, most }: Shown) {
  const { rows, columns, url } = picture;
  const positions = [...(run.value?.patches ?? [])].flatMap(([at, patch]) => (patch.picture === picture ? [at] : []));
  const share = positions.reduce((sum, position) => sum + weight(row.codes[position]), 0);
  const over = positions.indexOf(hovered.value ?? -1);
  const pick = (event: PointerEvent) => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const line = Math.floor(((event.clientY - box.top) / box.height) * rows);
    hovered.value = positions[line * columns + column] ?? null;
  };
  const cell = (i: number) => ({ x: i % columns, y: Math.floor(i / columns), width: 1, height: 1 });
  return (
    <svg
      class="heat-map"
      viewBox={`0 0 ${columns} ${rows}`}
      role="img"
      aria-label={`Picture ${number}: ${percent(share)} of the weight`}
      onPointerMove={pick}
      onPointerLeave={() => (hovered.value = null)}
    >
      <image href={url} width={columns} height={rows} preserveAspectRatio="none" />
      {positions.map((position, i) => {
        const code = row.codes[position] ?? 0;
        return (
          code > 0 && (
            <rect key={i} {...cell(i)} data-position={position} style={{ opacity: DENSEST * (code / most) ** 2 }} />
          )
        );
      })}
      {over >= 0 && <rect class="heat-over" {...cell(over)} />}
    </svg>
  );
}
