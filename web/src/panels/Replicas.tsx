// The replicas of a server as rooms with their walls, and the ways of the last texts through them: a text whose replica
// died goes on in another room, at its next token. The page does not show the texts, which belong to their clients.

import { useEffect } from "preact/hooks";
import { call } from "../visit/api";
import { count, plural } from "../ui/format";
import {
  REPLICA_ROOM,
  REPLICAS_CARD,
  TEXT_ROUTE,
  type ReplicaRoom,
  type ReplicasCard,
  type TextRoute,
} from "../schema/rooms";
import { Lead } from "../ui/Lead";
import { Datum, Failed, asked } from "./common";
import "../style/panels/replicas.css";

const EVERY = 400; // ms

const found = asked<ReplicasCard>();

const look = (): Promise<void> => found.ask((stop) => call<ReplicasCard>("replicas", { signal: stop }));

export default function Replicas() {
  useEffect(() => {
    void look();
    const timer = setInterval(() => found.busy.value || void look(), EVERY);
    return () => clearInterval(timer);
  }, []);
  const card = found.value.value;
  return (
    <>
      <Lead result={card ? result(card) : ""}>
        Each room is a process with the whole model and a KV cache of its own. The router gives a text to the room that
        has its beginning cached, or has least to do. If the process dies, another room goes on at the same token.
      </Lead>
      <Failed of={found} />
      {card && (
        <>
          <ol class="rooms">
            {card.rooms.map((room, i) => (
              <Room key={i} room={room} index={i} />
            ))}
          </ol>
          <dl class="panel-figures">
            <Datum of={card} table={REPLICAS_CARD} field="waiting" name="replicas_waiting" />
          </dl>
          <Texts card={card} />
        </>
      )}
    </>
  );
}

/** What is the case, and the last move of a text. */
function result({ rooms, texts }: ReplicasCard): string {
  const taking = rooms.filter(({ state }) => state === "taking").length;
  const writing = texts.filter(({ ended }) => !ended).length;
  const now = `${count(taking)} of ${plural(rooms.length, "replica")} take texts; ${writing === 0 ? "none is" : `${plural(writing, "text")} ${writing === 1 ? "is" : "are"}`} being written.`;
  const moved = texts.find(({ way }) => way.length > 1);
  return moved === undefined ? now : `${now} ${move(moved)}`;
}

function move({ number, way }: TextRoute): string {
  const [before, after] = [way.at(-2), way.at(-1)];
  if (before === undefined || after === undefined) return "";
  return `Replica ${before.room + 1} ${LEFT[before.left]} in text ${number}: replica ${after.room + 1} went on after its token ${count(after.since)}.`;
}

const LEFT = { "": "ended", died: "died", replaced: "was replaced" };

function Room({ room, index }: { room: ReplicaRoom; index: number }) {
  const [used, cached] = [room.used, room.cached].map((pages) => `${(100 * pages) / room.pages}%`);
  const name = `replica_${index}`;
  return (
    <li class={`room ${room.state}`} data-name={room.name}>
      <h3>
        Replica {index + 1} <span class="room-state">{STATES[room.state]}</span>
      </h3>
      <div class="room-wall" style={{ "--used": used, "--cached": cached }} aria-hidden="true">
        <i class="used" />
        <i class="cached" />
      </div>
      <dl>
        {(["texts", "used", "cached", "pages", "opened"] as const).map((field) => (
          <Datum key={field} of={room} table={REPLICA_ROOM} field={field} name={`${name}_${field}`} />
        ))}
      </dl>
      <p class="panel-note">{room.name === "" ? "no process yet" : `process ${room.name}`}</p>
    </li>
  );
}

const STATES = { starting: "is being started", taking: "takes texts", draining: "finishes its texts" };

function Texts({ card }: { card: ReplicasCard }) {
  if (card.texts.length === 0)
    return <p class="panel-note">No text was written yet. Send a request to this server, or write in the chat.</p>;
  return (
    <table class="panel-table ways">
      <caption>The last texts, and which replica wrote which of their tokens</caption>
      <thead>
        <tr>
          <th scope="col">text</th>
          <th scope="col">prompt</th>
          <th scope="col">written</th>
          <th scope="col">its way</th>
        </tr>
      </thead>
      <tbody>
        {card.texts.map((text) => (
          <tr key={text.number} data-text={text.number} data-ended={text.ended}>
            <th scope="row">{text.number}</th>
            <td>
              <Datum of={text} table={TEXT_ROUTE} field="prompt" name={`text_${text.number}_prompt`} label={false} />
            </td>
            <td>
              <Datum of={text} table={TEXT_ROUTE} field="written" name={`text_${text.number}_written`} label={false} />
            </td>
            <td>
              <Way text={text} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** Its parts as stretches of one bar, each as long as its tokens. */
function Way({ text }: { text: TextRoute }) {
  if (text.way.length === 0) return <>waits for a replica</>;
  return (
    <ol class="way-parts">
      {text.way.map((part, i) => {
        const tokens = (text.way[i + 1]?.since ?? text.written) - part.since;
        return (
          <li
            key={i}
            class={part.left}
            data-room={part.room}
            data-name={part.name}
            data-since={part.since}
            style={{ flexGrow: Math.max(1, tokens) }}
          >
            replica {part.room + 1}: {plural(tokens, "token")}
            {part.left !== "" && <b> {LEFT[part.left]}</b>}
          </li>
        );
      })}
    </ol>
  );
}
