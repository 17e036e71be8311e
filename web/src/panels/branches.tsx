// Branches: the tree of runs that forked from one text. Choosing a candidate of the shown step goes on with it; the
// pages of the KV cache up to there are the same ones, and the pool counts what that saves.

import { verbatim } from "../language/language";
import { useEffect } from "preact/hooks";
import * as branches from "../run/branches";
import { count, numbered, percent, plural } from "../ui/format";
import { asking, frame, last, live, run, shown } from "../visit/store";
import { quoted } from "../ui/text";
import { BRANCH, type Branch } from "../schema/branches";
import { Lead } from "../ui/Lead";
import { Told } from "../ui/Stat";
import { runIt } from "./usable";
import "../style/panels/branches.css";

const LISTED = 8;
const PAUSE = 250; // ms without a new step before the server is asked again

export default function Panel() {
  const current = run.value;
  const steps = last.value;
  const state = current?.state.value.state;
  useEffect(() => {
    const timer = setTimeout(() => void branches.refresh(), PAUSE);
    return () => clearTimeout(timer);
  }, [current, steps, state]);
  return (
    <>
      <Lead result={live.value ? result(branches.tree.value?.branches ?? []) : ""}>
        Choose another token at a step: the text continues with it in a branch. A branch uses the pages of the KV cache
        that the run filled up to that step, so the beginning is not computed again.
      </Lead>
      {live.value ? (
        <>
          <Choices />
          <Tree />
        </>
      ) : (
        <p class="sentence">This is a recording: no engine can continue it.{runIt()}</p>
      )}
    </>
  );
}

function result(found: readonly Branch[]): string {
  if (found.length < 2) return "";
  const reused = found.reduce((sum, one) => sum + one.reused, 0);
  return `${count(found.length)} texts grow from one beginning; ${plural(reused, "token")} of the later ones were not computed again.`;
}

/** The candidates of the shown step: each is a way on. */
function Choices() {
  const step = frame.value;
  const current = run.value;
  if (step === null || current === null || step.token === null)
    return <p class="sentence">{step === null ? "No step yet." : "This step read a part of the prompt."}</p>;
  const position = step.start + step.length;
  return (
    <section class="ways">
      <h3>
        At step {numbered(step.step)}, token {numbered(position)}
      </h3>
      <div class="ways-list">
        {step.candidates
          .filter(({ token }) => token !== step.token)
          .slice(0, LISTED)
          .map(({ token, logprob }) => (
            <button
              type="button"
              key={token}
              disabled={asking.value}
              data-fork={token}
              title={`Continue with ${quoted(current.named(token).text)} in a branch`}
              onClick={() => void branches.fork(step.step, token)}
            >
              <b>{quoted(current.named(token).text)}</b> {percent(Math.exp(logprob))}
            </button>
          ))}
      </div>
      <button
        type="button"
        class="ways-rewind"
        disabled={asking.value || shown.value === last.value}
        title="Continue from this step with the token that was written, in a branch. The text after it stays in the first run"
        onClick={() => void branches.fork(step.step, null)}
      >
        Rewind to this step, keep {quoted(current.named(step.token).text)}
      </button>
    </section>
  );
}

function Tree() {
  const found = branches.tree.value?.branches ?? [];
  if (found.length === 0) return null;
  const most = Math.max(...found.map(({ steps }) => steps), 1);
  return (
    <section class="tree">
      <h3>{found.length === 1 ? "One run, no branch yet" : `${count(found.length)} runs in this tree`}</h3>
      <ol>
        {ordered(found).map(({ branch, depth }) => (
          <Row key={branch.run} branch={branch} depth={depth} most={most} only={found.length === 1} />
        ))}
      </ol>
      <p class="tree-key">
        <span class="swatch before" /> before the fork <span class="swatch own" /> its own steps
      </p>
    </section>
  );
}

function Row({ branch, depth, most, only }: { branch: Branch; depth: number; most: number; only: boolean }) {
  const here = run.value?.id.value === branch.run;
  const forked = branch.step === null ? 0 : branch.step + 1;
  const named =
    branch.token === null ? "the first run" : `${quoted(branch.token.text)} at step ${numbered(branch.step ?? 0)}`;
  const left = (forked / most) * 100;
  return (
    <li class="tree-row" aria-current={here} data-branch={branch.run} style={{ "--depth": Math.min(depth, 6) }}>
      <button
        type="button"
        class="tree-choose"
        aria-pressed={here}
        disabled={branches.known(branch.run) === undefined}
        onClick={() => branches.choose(branch.run)}
      >
        <span class="tree-name">
          <b>{named}</b> <span class="under">{state(branch)}</span>
        </span>
        <span class="tree-text">{branch.text === "" ? "nothing written yet" : verbatim(branch.text)}</span>
        <span class="tree-track" aria-hidden="true">
          <i class="before" style={{ width: `${left}%` }} />
          <i class="own" style={{ width: `${Math.max(1, (branch.steps / most) * 100 - left)}%` }} />
        </span>
      </button>
      <div class="tree-figures">
        <dl>
          <div>
            <dt>pages</dt>
            <dd>
              <Told name={`branch_${branch.run}_pages`} value={branch.pages} about={plain(BRANCH.pages)} />
            </dd>
          </div>
          <div>
            <dt>shared</dt>
            <dd>
              <Told name={`branch_${branch.run}_shared`} value={branch.shared} about={plain(BRANCH.shared)} />
            </dd>
          </div>
          <div>
            <dt>saved</dt>
            <dd>
              <Told name={`branch_${branch.run}_saved_bytes`} value={branch.saved_bytes} about={BRANCH.saved_bytes} />
            </dd>
          </div>
          <div>
            <dt>reused</dt>
            <dd>
              <Told name={`branch_${branch.run}_reused`} value={branch.reused} about={BRANCH.reused} />
            </dd>
          </div>
        </dl>
        <button
          type="button"
          class="tree-close"
          disabled={only || branches.known(branch.run) === undefined}
          aria-label={`Close ${named} and free its pages`}
          onClick={() => void branches.close(branch.run)}
        >
          Close
        </button>
      </div>
    </li>
  );
}

const plain = <T extends { unit: string }>(about: T | undefined): T | undefined => about && { ...about, unit: "" };

function state({ state, steps }: Branch): string {
  return `${state}, ${count(steps)} ${steps === 1 ? "step" : "steps"}`;
}

/** Each run after the one that it forked from. */
function ordered(found: readonly Branch[]): { branch: Branch; depth: number }[] {
  const ids = new Set(found.map(({ run }) => run));
  const below = (parent: string | null, depth: number): { branch: Branch; depth: number }[] =>
    found
      .filter((branch) => (branch.parent !== null && ids.has(branch.parent) ? branch.parent : null) === parent)
      .flatMap((branch) => [{ branch, depth }, ...below(branch.run, depth + 1)]);
  return below(null, 0);
}
