// The button that goes from the system's colours to dark, to light, and round.

import { choice, choose, type Choice } from "../visit/theme";
import { Icon } from "./icons";

const NEXT: Record<Choice, Choice> = { auto: "dark", dark: "light", light: "auto" };
const PICTURE = { auto: "auto", dark: "moon", light: "sun" } as const;

export function Theme() {
  return (
    <button
      type="button"
      class="tool square"
      onClick={() => choose(NEXT[choice.value])}
      aria-label={`Colours: ${choice.value}`}
      title={`Colours: ${choice.value}. Next: ${NEXT[choice.value]}`}
    >
      <Icon name={PICTURE[choice.value]} />
    </button>
  );
}
