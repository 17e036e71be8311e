// How the stage is looked at: from which camera, in 3-D or 2-D, and which layer and head.

import * as actions from "../visit/actions";
import { CAMERAS, type Camera, camerasOf } from "./renderers/renderer";
import { selected } from "../run/answers/attention-row";
import { camera, card, pictureTime, renderer, run } from "../visit/store";
import { Icon } from "../ui/icons";

const NAMES: Record<Camera, string> = { iso: "Iso", top: "Top", side: "Side", head: "Head", follow: "Follow" };

export function Cameras() {
  return (
    <div class="cameras" role="group" aria-label="View">
      {camerasOf(renderer.value).map((name) => (
        <button
          type="button"
          key={name}
          aria-pressed={camera.value.name === name}
          onClick={() => actions.setCamera(name)}
          title={`${MEANINGS[name]} (${CAMERAS.indexOf(name) + 1})`}
        >
          {NAMES[name]}
        </button>
      ))}
      <span class="divider" aria-hidden="true" />
      {(["3d", "2d"] as const).map((kind) => (
        <button
          type="button"
          key={kind}
          aria-pressed={renderer.value === kind}
          onClick={() => actions.setRenderer(kind)}
          title={kind === "2d" ? "Draw in 2-D (V)" : `Draw in 3-D (V)${slowness()}`}
        >
          {kind === "3d" ? "3-D" : "2-D"}
        </button>
      ))}
    </div>
  );
}

const MEANINGS: Record<Camera, string> = {
  iso: "The beams and the wall",
  top: "The beams alone, from above",
  side: "The wall of the cache, from the front",
  head: "Along the row, from the write head",
  follow: "The newest tokens",
};

/** A machine without graphics hardware was found to be too slow for 3-D before the first picture. */
function slowness(): string {
  return pictureTime.value === null
    ? ""
    : `; without graphics hardware ${Math.round(pictureTime.value)} ms a picture here`;
}

export function Selectors() {
  const { layer, head } = selected.value;
  const fixed = run.value !== null && run.value.origin !== "live";
  const title = fixed ? "A recording has the rows of one layer and head only" : undefined;
  return (
    <div class="selectors" {...(title ? { title } : {})}>
      <Stepper
        name="layer"
        value={layer}
        of={card.value?.layers ?? 0}
        keys="[ ]"
        disabled={fixed}
        change={actions.changeLayer}
      />
      <Stepper
        name="head"
        value={head}
        of={card.value?.heads ?? 0}
        keys="{ }"
        disabled={fixed}
        change={actions.changeHead}
      />
    </div>
  );
}

interface StepperProps {
  name: string;
  value: number;
  of: number;
  keys: string;
  disabled: boolean;
  change(by: number): void;
}

function Stepper({ name, value, of, keys, disabled, change }: StepperProps) {
  return (
    <div class="stepper" role="group" aria-label={name}>
      <span class="stepper-name">{name}</span>
      <button
        type="button"
        aria-label={`${name} before`}
        title={`${name} (${keys})`}
        disabled={disabled}
        onClick={() => change(-1)}
      >
        <Icon name="minus" />
      </button>
      <output class="stepper-value">
        {of > 0 ? value : "–"}
        <span class="of"> of 0–{of > 0 ? of - 1 : "–"}</span>
      </output>
      <button
        type="button"
        aria-label={`${name} after`}
        title={`${name} (${keys})`}
        disabled={disabled}
        onClick={() => change(1)}
      >
        <Icon name="plus" />
      </button>
    </div>
  );
}
