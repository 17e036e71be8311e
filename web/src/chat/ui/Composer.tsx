// Where one writes. Enter sends, Shift+Enter makes a new line; while the model writes, the button stops it.

import { useSignal } from "@preact/signals";
import { model, say, stop, turns, writing } from "../store";

export function Composer() {
  const text = useSignal("");
  const continues = model.value?.template === false;
  const busy = writing.value !== null;
  const may = model.value !== null && !busy && (text.value.trim() !== "" || (continues && turns.value.length > 0));
  const send = () => {
    if (!may) return;
    say(continues ? text.value : text.value.trim());
    text.value = "";
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      <textarea
        aria-label={continues ? "Text" : "Message"}
        placeholder={placeholder(continues)}
        rows={Math.min(8, Math.max(2, text.value.split("\n").length))}
        value={text.value}
        onInput={(event) => (text.value = event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
          event.preventDefault();
          send();
        }}
      />
      {busy ? (
        <button type="button" class="send" onClick={stop}>
          Stop
        </button>
      ) : (
        <button type="submit" class="send" disabled={!may}>
          {continues ? "Continue" : "Send"}
        </button>
      )}
    </form>
  );
}

function placeholder(continues: boolean): string {
  if (!continues) return "Write a message";
  return turns.value.length === 0 ? "Once upon a time" : "Add to the text, or just continue";
}
