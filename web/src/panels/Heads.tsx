// The head atlas: every head of every layer at the shown step, named by what it does in this text; the whole matrix of the
// chosen head; and the lens, each layer's guess at the next token. The engine computes all of it on request.

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { call } from "../visit/api";
import { count, percent, plural } from "../ui/format";
import * as nextRun from "../run/next-run";
import { select, selected } from "../run/answers/attention-row";
import { WEIGHTS } from "../stage/scene";
import { start } from "../visit/session";
import { run } from "../visit/store";
import { marked } from "../ui/text";
import { theme } from "../visit/theme";
import type { AtlasCard, HeadCard, LensCard, MatrixCard } from "../schema/heads";
import { Lead } from "../ui/Lead";
import { Badge } from "../ui/Stat";
import { Failed, Nothing, asked, present, useRested } from "./common";
import "../style/panels/heads.css";

type Kind = HeadCard["kind"];

const atlas = asked<AtlasCard>();
const matrix = asked<MatrixCard>();
const lens = asked<LensCard>();
const only = signal<Kind | null>(null); // heads of other kinds are dim
const pointed = signal<readonly [row: number, column: number] | null>(null); // positions in the matrix

const MEANINGS: Record<Kind, string> = {
  previous: "reads the token before",
  induction: "reads what followed the same token earlier",
  sink: "leaves its weight on the first token",
  local: "reads the last eight tokens",
  mixed: "does none of these in this text",
};

const KINDS = ["previous", "induction", "sink", "local"] as const;
const READS: Record<(typeof KINDS)[number], string> = {
  previous: "the token before",
  induction: "what followed earlier",
  sink: "the first token",
  local: "the last eight tokens",
};

export default function Heads() {
  const { layer, head } = selected.value;
  useRested((id, step) => {
    void atlas.ask(() => call<AtlasCard>(`runs/${id}/atlas?step=${step}`));
    void lens.ask(() => call<LensCard>(`runs/${id}/lens?step=${step}`));
  });
  useRested(
    (id, step) => void matrix.ask(() => call<MatrixCard>(`runs/${id}/matrix?step=${step}&layer=${layer}&head=${head}`)),
    layer,
    head,
  );
  const found = atlas.value.value;
  return (
    <>
      <Lead result={found && present() ? result(found) : ""}>
        Every attention head, layers down and heads across, named by what it reads in this text. Choose one: the beams
        on the stage show it, and its whole matrix is below.
      </Lead>
      {!present() ? (
        <Nothing />
      ) : (
        <>
          <Failed of={atlas} />
          {found && <Atlas card={found} />}
          {found && <Kinds card={found} />}
          {found && <Chosen card={found} />}
          <Matrix />
          <Lens />
        </>
      )}
    </>
  );
}

/** How many heads do what, the most frequent first. */
function result({ heads }: AtlasCard): string {
  const counts = KINDS.map((kind) => ({ kind, heads: heads.filter((one) => one.kind === kind).length }));
  const named = counts.filter((one) => one.heads > 0).sort((a, b) => b.heads - a.heads);
  const said = named.map((one) => `${count(one.heads)} ${READS[one.kind]}`);
  return `What ${plural(heads.length, "head")} mostly read: ${said.join(", ") || "none"}.`;
}

const letter = (kind: Kind): string => (kind === "mixed" ? "" : kind[0]!.toUpperCase());

/** What the names mean, how many heads have each, and what would show an induction head. */
function Kinds({ card }: { card: AtlasCard }) {
  const judged = card.repeats >= card.needed;
  return (
    <>
      <ul class="head-kinds">
        {card.kinds.map((kind, i) => (
          <li key={kind}>
            <button
              type="button"
              aria-pressed={only.value === kind}
              onClick={() => (only.value = only.value === kind ? null : kind)}
            >
              <span class={`head-kind is-${kind}`} aria-hidden="true">
                {letter(kind)}
              </span>
              {kind}: <b data-count={kind}>{card.heads.filter((head) => head.kind === kind).length}</b>
            </button>
            <span class="under">
              {MEANINGS[kind]}, with {percent(card.thresholds[i] ?? 0)} or more
              {kind === "induction" && !judged ? "; not judged here" : ""}
            </span>
          </li>
        ))}
      </ul>
      <p class="panel-note">
        Means over {plural(card.rows, "position")}, by the first threshold that is reached.{" "}
        {judged
          ? `${plural(card.repeats, "token")} stood in the text before.`
          : `Only ${plural(card.repeats, "token")} stood in the text before; induction needs ${card.needed}.`}
      </p>
      {!judged && (
        <p>
          <button
            type="button"
            class="panel-go"
            onClick={() => {
              nextRun.prompt.value = nextRun.REPEATED;
              void start();
            }}
          >
            Run twelve words, three times over
          </button>
        </p>
      )}
    </>
  );
}

/** A row of buttons for each layer, a head each, with its weights over the text; one tab stop, arrows move it. */
function Atlas({ card }: { card: AtlasCard }) {
  const { layer, head } = selected.value;
  const heads = Math.max(...card.heads.map((one) => one.head)) + 1;
  const layers = card.heads.length / heads;
  const move = (event: KeyboardEvent) => {
    const [down, across] = MOVES[event.key] ?? [0, 0];
    if (down === 0 && across === 0) return;
    event.preventDefault();
    event.stopPropagation(); // the page's arrows are for steps
    const [l, h] = [Math.min(layers - 1, Math.max(0, layer + down)), Math.min(heads - 1, Math.max(0, head + across))];
    select(l, h);
    (event.currentTarget as Element).querySelector<HTMLElement>(`[data-head="${l}/${h}"]`)?.focus();
  };
  return (
    <div class="panel-scroll" tabIndex={0}>
      <div
        class="atlas"
        role="group"
        aria-label="Heads: layers down, heads across"
        style={{ gridTemplateColumns: `repeat(${heads}, minmax(var(--least), 1fr))` }}
        onKeyDown={move}
      >
        {card.heads.map((one) => (
          <Head key={`${one.layer}/${one.head}`} one={one} now={one.layer === layer && one.head === head} />
        ))}
      </div>
    </div>
  );
}

const MOVES: Record<string, readonly [number, number]> = {
  ArrowDown: [1, 0],
  ArrowUp: [-1, 0],
  ArrowRight: [0, 1],
  ArrowLeft: [0, -1],
};

function Head({ one, now }: { one: HeadCard; now: boolean }) {
  const codes = bytes(one.codes);
  let path = "";
  codes.forEach((code, i) => {
    if (code > 2) path += `M${i + 0.1} 20V${(20 - (20 * code) / 255).toFixed(1)}h0.8V20z`;
  });
  const dim = only.value !== null && only.value !== one.kind;
  const name = `layer ${one.layer}, head ${one.head}: ${one.kind}; sink ${percent(one.sink)}, previous ${percent(one.previous)}, local ${percent(one.local)}`;
  return (
    <button
      type="button"
      class={`atlas-head is-${one.kind} ${dim ? "dim" : ""}`}
      aria-pressed={now}
      aria-label={name}
      title={name}
      tabIndex={now ? 0 : -1}
      data-head={`${one.layer}/${one.head}`}
      data-kind={one.kind}
      onClick={() => select(one.layer, one.head)}
    >
      <svg viewBox={`0 0 ${codes.length} 20`} preserveAspectRatio="none" aria-hidden="true">
        <path d={path} />
      </svg>
      <span aria-hidden="true">{letter(one.kind)}</span>
    </button>
  );
}

function bytes(base64: string): Uint8Array {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

function Chosen({ card }: { card: AtlasCard }) {
  const { layer, head } = selected.value;
  const one = card.heads.find((other) => other.layer === layer && other.head === head);
  if (one === undefined) return null;
  const masses = [
    ["previous token", one.previous],
    ["induction", one.induction],
    ["first token", one.sink],
    ["last eight", one.local],
  ] as const;
  return (
    <>
      <h2>
        Layer {layer}, head {head}: {one.kind}
        <span class="under">
          {" "}
          {MEANINGS[one.kind]}; means over {plural(card.rows, "position")}
        </span>
      </h2>
      <dl class="panel-figures">
        {masses.map(([name, mass]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <span class="value" data-mass={mass ?? ""}>
                {mass === null ? "–" : percent(mass)}
              </span>
              <Badge source="read" meaning="mean weight over the positions above, computed from the cached keys" />
            </dd>
          </div>
        ))}
      </dl>
    </>
  );
}

function Matrix() {
  const canvas = useRef<HTMLCanvasElement>(null);
  const found = matrix.value.value;
  const look = theme.value;
  useEffect(() => {
    if (found && canvas.current) paint(canvas.current, found);
  }, [found, look]);
  if (!found) return <Failed of={matrix} />;
  const codes = bytes(found.codes);
  const point = (event: PointerEvent) => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const cell = (share: number) => Math.min(found.size - 1, Math.max(0, Math.floor(share * found.size)));
    pointed.value = [cell(y), cell(x)];
  };
  const last = found.size - 1;
  const [row, column] = pointed.value ?? [
    last,
    codes.subarray(last * found.size).indexOf(Math.max(...codes.subarray(last * found.size))),
  ];
  const word = (cell: number) => run.value?.called(found.first + cell * found.cell);
  return (
    <>
      <h2>
        Its matrix <span class="under">rows read columns; nothing lies above the diagonal</span>
      </h2>
      <figure class="matrix">
        <canvas
          ref={canvas}
          role="img"
          aria-label={`Attention matrix of layer ${found.layer}, head ${found.head}: ${found.size} by ${found.size} cells`}
          data-size={found.size}
          onPointerMove={point}
          onPointerLeave={() => (pointed.value = null)}
        />
        <figcaption>
          {word(row)} reads {word(column)} with {percent(WEIGHTS[codes[row * found.size + column] ?? 0] ?? 0)}
          {found.cell > 1 && (
            <span class="under">
              {" "}
              a cell is {found.cell} × {found.cell} tokens: its largest weight
            </span>
          )}
        </figcaption>
      </figure>
    </>
  );
}

function paint(canvas: HTMLCanvasElement, card: MatrixCard): void {
  canvas.width = canvas.height = card.size;
  const c = canvas.getContext("2d");
  if (c === null) return;
  const style = getComputedStyle(canvas);
  const [ground, beam] = [rgb(style.getPropertyValue("--empty")), rgb(style.getPropertyValue("--beam"))];
  const picture = c.createImageData(card.size, card.size);
  bytes(card.codes).forEach((code, i) => {
    const above = i % card.size > Math.floor(i / card.size);
    for (let k = 0; k < 3; k++) picture.data[4 * i + k] = ground[k]! + ((beam[k]! - ground[k]!) * code) / 255;
    picture.data[4 * i + 3] = above ? 0 : 255;
  });
  c.putImageData(picture, 0, 0);
}

/** A colour of the theme, which is written as #rrggbb. */
function rgb(text: string): number[] {
  const value = parseInt(text.trim().slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function Lens() {
  const found = lens.value.value;
  if (!found) return <Failed of={lens} />;
  const most = Math.max(...found.rows.map((row) => row.probability), 1e-9);
  return (
    <>
      <h2>
        The lens <span class="under">each layer's guess, through the final norm and the head</span>
      </h2>
      <div class="panel-scroll" tabIndex={0}>
        <table class="panel-table lens">
          <thead>
            <tr>
              <th scope="col">after</th>
              <th scope="col">its guess</th>
              <th scope="col">probability</th>
              <th scope="col" title="how many tokens this layer gives a higher probability">
                rank of {marked(found.chosen.text)}
              </th>
            </tr>
          </thead>
          <tbody>
            {found.rows.map((row) => (
              <tr key={row.layer} data-layer={row.layer} class={row.token.id === found.chosen.id ? "right" : ""}>
                <td>{row.layer < 0 ? "the embedding" : `layer ${row.layer}`}</td>
                <td class="word">{marked(row.token.text)}</td>
                <td data-probability={row.probability}>
                  <span class="lens-bar" aria-hidden="true">
                    <i style={{ width: `${(100 * row.probability) / most}%` }} />
                  </span>
                  {percent(row.probability)}
                </td>
                <td>{row.rank === 0 ? "first" : count(row.rank + 1)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
