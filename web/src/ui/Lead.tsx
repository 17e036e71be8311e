// The head of a panel: what it has found in one sentence, and in small what the panel does. Until it has found something
// that stands by itself.

import type { ComponentChildren } from "preact";

export function Lead({ result = "", children }: { result?: string; children: ComponentChildren }) {
  if (result === "") return <p class="panel-lead">{children}</p>;
  return (
    <>
      <p class="panel-result">{result.replaceAll(" %", "\u00a0%")}</p>
      <p class="panel-lead about">{children}</p>
    </>
  );
}
