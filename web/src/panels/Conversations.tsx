// The tokens that the cache found of each turn of the visitor’s own conversations, and why it found no more:
// live while an agent works. The server says it of the key that the page has; nothing of another key comes here.

import { useEffect } from "preact/hooks";
import { call } from "../visit/api";
import { verbatim } from "../language/language";
import { count, percent, plural } from "../ui/format";
import {
  CONVERSATION_CARD,
  CONVERSATIONS_CARD,
  CONVERSATION_TURN,
  PINNED_PREFIX,
  type ConversationCard,
  type ConversationTurn,
  type ConversationsCard,
  type PinnedPrefix,
} from "../schema/conversations";
import { Lead } from "../ui/Lead";
import { Datum, Failed, asked } from "./common";
import "../style/panels/conversations.css";

const EVERY = 1000; // ms

const found = asked<ConversationsCard>();

const look = (): Promise<void> => found.ask((stop) => call<ConversationsCard>("conversations", { signal: stop }));

export default function Conversations() {
  useEffect(() => {
    void look();
    const timer = setInterval(() => found.busy.value || void look(), EVERY);
    return () => clearInterval(timer);
  }, []);
  const card = found.value.value;
  return (
    <>
      <Lead result={card === null || card.conversations.length === 0 ? "" : result(card)}>
        Each turn of a conversation sends the whole of it again. The bar of a turn is its prompt: tokens that the cache
        had, tokens that are new, and tokens that were computed before and had to be computed again, with the cause.
      </Lead>
      <Failed of={found} />
      {card?.conversations.length === 0 && (
        <p class="panel-note">No conversation was answered yet. Write in the chat, or let an agent use this server.</p>
      )}
      {card !== null && card.conversations.length > 0 && (
        <dl class="panel-figures">
          {(["reused", "computed"] as const).map((field) => (
            <Datum key={field} of={card} table={CONVERSATIONS_CARD} field={field} name={`talks_${field}`} />
          ))}
        </dl>
      )}
      {card?.conversations.map((one, i) => (
        <Talk key={one.turns[0]?.name ?? i} talk={one} index={i} />
      ))}
      {card !== null && card.pins.length > 0 && <Pins pins={card.pins} />}
    </>
  );
}

/** What the cache has saved, and what it lost most by. */
function result({ reused, computed, conversations }: ConversationsCard): string {
  const share = reused / Math.max(1, reused + computed);
  const saved = `The cache had ${percent(share)} of ${plural(reused + computed, "prompt token")}.`;
  const lost = new Map<string, number>();
  for (const { cause, again } of conversations.flatMap(({ turns }) => turns))
    if (cause !== "") lost.set(cause, (lost.get(cause) ?? 0) + again);
  const [most] = [...lost].sort(([, one], [, other]) => other - one);
  return most === undefined ? saved : `${saved} ${plural(most[1], "token")} came again: ${said(most[0])}.`;
}

const CAUSES: Record<string, string> = {
  model_changed: "the model, its adapter or the cache’s format changed",
  key_changed: "the salt of the key changed",
  tools_changed: "the tools changed",
  system_changed: "the system message changed",
  message_changed: "an earlier message changed",
  context_compacted: "earlier messages were left out",
  thoughts_dropped: "the template leaves out earlier thoughts",
  answer_retokenised: "an answer came back as other tokens",
  format_changed: "the effort or the format changed",
  evicted: "its pages made room for other texts",
  expired: "its pages’ time was over",
  below_a_page: "the texts part inside a page",
  other_replica: "its pages are with another replica",
  disk_slower: "the disk was slower than computing",
};

const said = (cause: string): string => CAUSES[cause] ?? cause.replaceAll("_", " ");

function Talk({ talk, index }: { talk: ConversationCard; index: number }) {
  const longest = Math.max(1, ...talk.turns.map(({ prompt }) => prompt));
  return (
    <section class="talk" data-session={talk.session}>
      <h3>{talk.title.trim() === "" ? `Conversation ${index + 1}` : verbatim(talk.title)}</h3>
      <dl class="panel-figures">
        {(["tokens", "in_memory", "on_disk"] as const).map((field) => (
          <Datum key={field} of={talk} table={CONVERSATION_CARD} field={field} name={`talk_${index}_${field}`} />
        ))}
      </dl>
      <ol class="talk-turns">
        {talk.turns.map((turn, at) => (
          <Turn key={turn.name} turn={turn} longest={longest} name={`talk_${index}_turn_${at}`} />
        ))}
      </ol>
    </section>
  );
}

const PARTS = ["reused", "new", "again"] as const;

function Turn({ turn, longest, name }: { turn: ConversationTurn; longest: number; name: string }) {
  return (
    <li data-cause={turn.cause}>
      <div class="talk-bar" style={{ "--whole": `${(100 * turn.prompt) / longest}%` }} aria-hidden="true">
        {PARTS.map((part) => turn[part] > 0 && <i key={part} class={part} style={{ flexGrow: turn[part] }} />)}
      </div>
      <dl class="talk-counts">
        {PARTS.map((part) => (
          <Datum key={part} of={turn} table={CONVERSATION_TURN} field={part} name={`${name}_${part}`} />
        ))}
      </dl>
      {turn.cause !== "" && <Cause turn={turn} />}
    </li>
  );
}

/** Texts often differ by a line’s end alone. */
const withEnds = (text: string): string => text.replaceAll("\n", "↵\n");

/** The cause, and the place where the texts part. */
function Cause({ turn }: { turn: ConversationTurn }) {
  const change = turn.change === "" ? "" : `, ${turn.change}`;
  const place = turn.part === "" ? "" : ` (${turn.part}${change})`;
  const at = turn.at === null ? "" : `, from token ${count(turn.at)}`;
  return (
    <details class="talk-cause">
      <summary>
        {said(turn.cause)}
        {place}
        {at}
      </summary>
      {turn.before === "" && turn.now === "" ? (
        <p class="panel-note">Both texts are equal: the cache no longer had it.</p>
      ) : (
        <dl>
          <dt>before</dt>
          <dd class="was" translate={false}>
            {withEnds(turn.before)}
          </dd>
          <dt>now</dt>
          <dd class="is" translate={false}>
            {withEnds(turn.now)}
          </dd>
        </dl>
      )}
    </details>
  );
}

function Pins({ pins }: { pins: readonly PinnedPrefix[] }) {
  return (
    <table class="panel-table">
      <caption>Pinned prefixes, which stay until their time is over</caption>
      <thead>
        <tr>
          <th scope="col">session</th>
          <th scope="col">{PINNED_PREFIX["tokens"]?.label}</th>
          <th scope="col">{PINNED_PREFIX["left_s"]?.label}</th>
        </tr>
      </thead>
      <tbody>
        {pins.map((pin, i) => (
          <tr key={i}>
            <th scope="row">{pin.session === "" ? "none" : pin.session}</th>
            <td>
              <Datum of={pin} table={PINNED_PREFIX} field="tokens" name={`pin_${i}_tokens`} label={false} />
            </td>
            <td>
              <Datum of={pin} table={PINNED_PREFIX} field="left_s" name={`pin_${i}_left`} label={false} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
