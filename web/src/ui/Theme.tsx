// The choices of a page's look: a button that goes from the system's colours to dark, to light, and round, and the page's
// language; a language names itself.

import { choose as speak, LANGUAGES, language } from "../language/language";
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

const nameOf = (code: string): string => new Intl.DisplayNames([code], { type: "language" }).of(code) ?? code;

export const Language = () => (
  <select
    class="language"
    aria-label="Language"
    title="Language"
    translate={false}
    value={language}
    onChange={(event) => speak(event.currentTarget.value)}
  >
    {LANGUAGES.map((code) => (
      <option key={code} value={code} lang={code} translate={false}>
        {nameOf(code)}
      </option>
    ))}
  </select>
);
