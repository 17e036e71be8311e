// The two pictures of the articles, drawn from the run on the stage: the typewriter that reads its own page, and the notebook
// of saved work, which grows by a line for each token.

import { count, numbered, plural } from "../../ui/format";
import { card, frame, length, run } from "../../visit/store";
import { marked } from "../../ui/text";

const WORDS = 24; // of the page, its newest
const LINES = 8; // of the notebook, its newest

/** The page in the machine: all of it is read, and one token is struck. */
export function Typewriter() {
  const current = run.value;
  if (current === null) return null;
  const end = length.value;
  const first = Math.max(0, end - WORDS);
  const written = frame.value !== null && frame.value.token !== null;
  return (
    <figure class="learn-typewriter">
      <p class="learn-page" translate={false}>
        {first > 0 && "… "}
        {current.pieces.slice(first, written ? end - 1 : end).join("")}
        {written && <b translate={false}>{current.pieces[end - 1]}</b>}
      </p>
      <div class="learn-machine" aria-hidden="true">
        <i />
      </div>
      <figcaption>
        It reads its page, {plural(written ? end - 1 : end, "token")}, and strikes one more. Then it reads the page
        again.
      </figcaption>
    </figure>
  );
}

/** A line for each token whose K and V are kept, with a square for each layer. */
export function Notebook() {
  const [current, step, layers] = [run.value, frame.value, card.value?.layers ?? 0];
  if (current === null || step === null) return null;
  const kept = step.cache ? step.start + step.length : 0;
  const first = Math.max(0, kept - LINES);
  const fresh = kept - step.length;
  return (
    <figure class="learn-notebook">
      <ol start={first + 1}>
        {Array.from({ length: kept - first }, (_, i) => first + i).map((position) => (
          <li key={position} class={position >= fresh ? "fresh" : ""}>
            <span class="learn-line">{numbered(position)}</span>
            <span class="learn-word">{marked(current.tokens[position]?.text ?? "")}</span>
            <span class="learn-squares" aria-hidden="true">
              {Array.from({ length: Math.min(layers, 12) }, (_, layer) => (
                <i key={layer} />
              ))}
            </span>
          </li>
        ))}
      </ol>
      <figcaption>
        {kept === 0
          ? "Without the cache the notebook stays empty."
          : `${plural(kept, "line")}, each with K and V of ${count(layers)} layers. Written in this step: ${count(step.length)}.`}
      </figcaption>
    </figure>
  );
}
