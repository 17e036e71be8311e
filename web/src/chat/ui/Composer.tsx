// Where one writes. Enter sends, Shift+Enter makes a new line; while the model writes, the button stops it.

import { useSignal } from "@preact/signals";
import { Icon } from "../../ui/icons";
import { attach, attached, detach, refused, taken } from "../pictures";
import { model, say, stop, turns, writing } from "../store";
import { Pictures } from "./Pictures";

export function Composer() {
  const text = useSignal("");
  const continues = model.value?.template === false;
  const busy = writing.value !== null;
  const given = text.value.trim() !== "" || attached.value.length > 0;
  const may = model.value !== null && !busy && (given || (continues && turns.value.length > 0));
  const send = () => {
    if (!may) return;
    say(continues ? text.value : text.value.trim(), taken());
    text.value = "";
  };
  const bring = (event: Event, files: FileList | null | undefined) => {
    if (continues || !files?.length) return;
    event.preventDefault();
    void attach([...files]);
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => bring(event, event.dataTransfer?.files)}
      onPaste={(event) => bring(event, event.clipboardData?.files)}
    >
      <Pictures urls={attached.value} remove={detach} />
      {refused.value !== "" && (
        <p class="under" role="alert">
          {refused.value}
        </p>
      )}
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
      {!continues && (
        <label class="attach" title="Add pictures; one can also paste or drop them">
          <Icon name="plus" />
          <span class="sr">Add pictures</span>
          <input
            type="file"
            accept="image/*"
            multiple
            onChange={(event) => {
              bring(event, event.currentTarget.files);
              event.currentTarget.value = "";
            }}
          />
        </label>
      )}
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
