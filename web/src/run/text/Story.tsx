// The narration: which of the five parts of the story is on, and the sentence about the step that is shown.

import { lanes } from "../../stage/lanes";
import { CHAPTERS, sentence } from "../../visit/story";

export function Story() {
  const race = lanes.value;
  const told = race === null ? sentence.value : null;
  const at = CHAPTERS.findIndex(([id]) => id === told?.chapter);
  return (
    <div class={`story in-${told?.chapter ?? "none"}`}>
      <ol class="chapters" aria-hidden="true">
        {CHAPTERS.map(([id, name, word], i) => (
          <li key={id} class={i === at ? "now" : i < at ? "past" : ""} title={name}>
            <i />
            {word}
          </li>
        ))}
      </ol>
      <p class="story-line">
        {race && (
          <>
            <b class="story-race">The race</b>
            <span data-narration="race">{race.told}</span>
          </>
        )}
        {told && (
          <>
            <b class="story-title sr">{CHAPTERS[at]?.[1]}</b>
            <span data-narration={told.chapter}>{told.text}</span>
          </>
        )}
      </p>
    </div>
  );
}
