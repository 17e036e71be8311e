// Which entries of the legend belong to a picture: those that the shown step has, and of them those that are drawn at this
// moment of its animation. The renderers say where they look; what is drawn when is said here for both.

import type { Beams } from "./beams";
import type { Phases } from "./motion";
import { rowLayer } from "./labels";
import { Cell, type Scene } from "./renderer";

export const ROLES = ["prompt", "generated", "kept", "shared", "recomputed", "fresh", "beam"] as const;
export type Role = (typeof ROLES)[number];

export interface Entry {
  role: Role;
  drawn: boolean; // at this moment; else later in this step
}

const REST: Phases = { fallen: 1, filled: Infinity, beams: 1, strike: 1 };

/** The entries of the positions first..last, in the order of `ROLES`. `wall`: whether the cache is drawn. */
export function entriesOf(
  scene: Scene,
  phases: Phases,
  beams: Beams,
  { first, last }: { first: number; last: number },
  wall: boolean,
): Entry[] {
  const seen = (at: Phases): Set<Role> => {
    const roles = new Set<Role>();
    for (let position = first; position <= last; position++) {
      const kind = scene.tokens[position]?.kind;
      const writing = position === scene.head && at.strike <= 0;
      if (kind !== undefined && !writing) roles.add(kind === "generated" ? "generated" : "prompt");
      if (wall) columnOf(scene, position, at, roles);
    }
    if (at.beams > 0 && beams.drawn.length > 0) roles.add("beam");
    return roles;
  };
  const later = seen(REST);
  const now = scene.progress < 1 ? seen(phases) : later;
  return ROLES.filter((role) => later.has(role)).map((role) => ({ role, drawn: now.has(role) }));
}

/** Adds what the column of a position shows, in each wall. */
function columnOf(scene: Scene, position: number, at: Phases, roles: Set<Role>): void {
  const wall = scene.layers / scene.lanes;
  const row = rowLayer(scene);
  for (let top = 0; top < scene.layers; top += wall) {
    const cell = scene.cells[position * scene.layers + top + row];
    const begun = at.filled > top;
    if (cell === Cell.kept) roles.add("kept");
    else if (cell === Cell.shared) roles.add("shared");
    else if (cell === Cell.fresh && begun) roles.add("fresh");
    else if (cell === Cell.recomputed && (begun || at.fallen < 1)) roles.add("recomputed");
  }
}
