// The conversations that this browser keeps.

import { drawn, verbatim } from "../../language/language";
import { Icon } from "../../ui/icons";
import { conversations, current, fresh, open, remove } from "../store";
import { type Conversation, title } from "../tree";

const named = (one: Conversation): string => {
  const words = title(one);
  return words === "" ? "New conversation" : verbatim(words);
};

export function Conversations({ close }: { close: () => void }) {
  const choose = (id: string) => () => {
    open(id);
    close();
  };
  const all = conversations.value;
  return (
    <aside class="kept-list" aria-label="Conversations">
      <button
        type="button"
        class="new"
        onClick={() => {
          fresh();
          close();
        }}
      >
        <Icon name="plus" />
        New conversation
      </button>
      <ul>
        {all.map((one) => (
          <li key={one.id} aria-current={one.id === current.value?.id ? "true" : undefined}>
            <button type="button" class="quiet name" onClick={choose(one.id)}>
              {named(one)}
            </button>
            <button
              type="button"
              class="quiet square"
              aria-label={`Delete: ${named(one)}`}
              title="Delete this conversation"
              onClick={() => confirm(drawn(`Delete “${named(one)}”? It is kept nowhere else.`)) && remove(one.id)}
            >
              <Icon name="close" />
            </button>
          </li>
        ))}
      </ul>
      {all.length > 1 && (
        <button
          type="button"
          class="quiet"
          onClick={() =>
            confirm(drawn(`Delete all ${all.length} conversations?`)) && all.forEach(({ id }) => remove(id))
          }
        >
          Delete all
        </button>
      )}
      <p class="under">Kept in this browser alone; the server keeps none.</p>
    </aside>
  );
}
