// The choice of the page's language. A language names itself.

import { choose, LANGUAGES, language } from "../language/language";

const nameOf = (code: string): string => new Intl.DisplayNames([code], { type: "language" }).of(code) ?? code;

export const Language = () => (
  <select
    class="language"
    aria-label="Language"
    title="Language"
    translate={false}
    value={language}
    onChange={(event) => choose(event.currentTarget.value)}
  >
    {LANGUAGES.map((code) => (
      <option key={code} value={code} lang={code} translate={false}>
        {nameOf(code)}
      </option>
    ))}
  </select>
);
