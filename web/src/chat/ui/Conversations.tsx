// The conversations that this browser keeps.

import { translated } from "../../language/language";
import { Icon } from "../../ui/icons";
import { conversations, current, fresh, open, remove } from "../store";
import { title } from "../tree";

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
              {title(one)}
            </button>
            <button
              type="button"
              class="quiet square"
              aria-label={`Delete: ${title(one)}`}
              title="Delete this conversation"
              onClick={() => confirm(translated(`Delete “${title(one)}”? It is kept nowhere else.`)) && remove(one.id)}
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
            confirm(translated(`Delete all ${all.length} conversations?`)) && all.forEach(({ id }) => remove(id))
          }
        >
          Delete all
        </button>
      )}
      <p class="under">Kept in this browser alone; the server keeps none.</p>
    </aside>
  );
}
