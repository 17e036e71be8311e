// Messages about the stage when there is more to say than the picture: loading, nothing yet, a failure, a lost
// connection, a replay. Where there is a picture it stands in a banner above it and covers nothing; where there is none
// it takes the middle. Each says what is the case, what is kept, and offers the next action.

import { translated, verbatim } from "../language/language";
import type { ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as actions from "../visit/actions";
import * as nextRun from "../run/next-run";
import { modelName, plural, sentence } from "./format";
import { lanes } from "../stage/lanes";
import * as session from "../visit/session";
import {
  alone,
  clustered,
  embedded,
  last,
  link,
  loading,
  model,
  pageState,
  problem,
  reachable,
  refused,
  rendererNote,
  retryAt,
  run,
  site,
} from "../visit/store";
import { loaded } from "../visit/messages";
import { Icon } from "./icons";
import { OwnModel } from "./OwnModel";

/** Above the picture. */
export function Banners() {
  return (
    <div class="banners">
      {rendererNote.value !== "" && (
        <Banner text={rendererNote.value}>
          <button type="button" onClick={() => actions.setRenderer("3d")}>
            Try 3-D
          </button>
          <Dismiss action={() => (rendererNote.value = "")} />
        </Banner>
      )}
      {problem.value?.kind === "trace" && (
        <Banner tone="warn" text={sentence(problem.value.message)}>
          <button type="button" onClick={actions.chooseTrace}>
            Open another
          </button>
          <Dismiss action={actions.dismiss} />
        </Banner>
      )}
      <OwnModel />
      {run.value !== null && <State />}
    </div>
  );
}

/** In place of the picture. */
export function Centre() {
  return (
    <>
      {run.value?.origin === "recorded" && <p class="watermark">Recorded</p>}
      {run.value === null && lanes.value === null && (
        <div class="centre">
          <State />
        </div>
      )}
    </>
  );
}

interface SayProps {
  title?: string;
  text: ComponentChildren;
  tone?: "calm" | "warn" | "bad";
  children?: ComponentChildren; // actions
}

function Banner({ title, text, tone = "calm", children }: SayProps) {
  return (
    <section class={`banner ${tone}`} {...(title ? { "aria-label": title } : {})}>
      <p>
        {title && <b>{title}. </b>}
        {text}
      </p>
      {children}
    </section>
  );
}

function Card({ title, text, tone = "calm", children }: SayProps) {
  return (
    <section class={`card ${tone}`}>
      <h2>{title}</h2>
      <p>{text}</p>
      {children && <div class="card-actions">{children}</div>}
    </section>
  );
}

/** A banner beside a picture, a card without one. */
function Say(props: SayProps) {
  return run.value === null ? <Card {...props} /> : <Banner {...props} />;
}

function Dismiss({ action }: { action(): void }) {
  return (
    <button type="button" class="quiet" onClick={action} aria-label="Dismiss">
      <Icon name="close" />
    </button>
  );
}

function OpenTrace() {
  return (
    <button type="button" onClick={actions.chooseTrace}>
      <Icon name="open" /> Open a trace
    </button>
  );
}

function State() {
  switch (pageState.value) {
    case "boot":
    case "loading-model":
      return <LoadingModel />;
    case "empty":
      return run.value === null ? <Empty /> : null;
    case "error":
      return <Failure />;
    case "disconnected":
      return <Disconnected />;
    case "expired":
      return <Expired />;
    case "replay":
      return <Replay />;
    default:
      return null;
  }
}

const AFTERWARDS = {
  none: "The prompt runs as soon as it is there.",
  recorded: "Then this recorded run gives way to a real one.",
  live: "Then this run continues.",
  file: "",
};

function LoadingModel() {
  const progress = loaded.value;
  const title = loading.value === null ? "Looking for the engine" : "Loading the model";
  const then = translated(AFTERWARDS[run.value?.origin ?? "none"]);
  const text = verbatim(progress ? `${translated(progress.text)}. ${then}` : then);
  return (
    <Say title={title} text={text}>
      <progress {...(progress ? { value: progress.share } : {})} max={1} aria-label={title} />
    </Say>
  );
}

function Empty() {
  if (clustered.value)
    return (
      <Card
        title="Replicas write here"
        text="They write without pauses and record no steps. The panel Replicas shows each of them, and the way of each text through them. To step through a run, serve one model without replicas."
      >
        <a href="chat">Write in the chat</a>
      </Card>
    );
  return (
    <Card
      title="Give it something to continue"
      text="A model reads the prompt once, then writes one token after the other. Begin with one of these, or your own."
    >
      <div class="choices">
        {nextRun.PROMPTS.map(({ name, text }) => (
          <button
            type="button"
            key={name}
            onClick={() => {
              nextRun.prompt.value = text;
              void session.start();
            }}
          >
            <b>{name}</b>
            <span>{text}</span>
          </button>
        ))}
      </div>
      <OpenTrace />
    </Card>
  );
}

function Failure() {
  if (loading.value?.phase === "failed" && model.value === null)
    return (
      <Say title="The model could not be loaded" tone="bad" text={sentence(loading.value.message)}>
        <OpenTrace />
      </Say>
    );
  if (refused.value !== "")
    return (
      <Say
        title="The engine answers with an error"
        tone="bad"
        text={`${sentence(refused.value)} The page asks again in some seconds.`}
      >
        {run.value === null && <OpenTrace />}
      </Say>
    );
  const state = run.value?.state.value;
  if (state?.state === "failed") {
    const kept = last.value >= 0 ? ` The ${plural(last.value + 1, "step")} before it stay here.` : "";
    return (
      <Say title="The engine failed on this run" tone="bad" text={`${sentence(state.message)}${kept}`}>
        <button type="button" onClick={() => void session.start()}>
          Run again
        </button>
      </Say>
    );
  }
  if (embedded.value) return <Unstarted />;
  if (run.value !== null) return null; // said beside the prompt, and the picture is still true
  return (
    <Card
      title="The run did not start"
      tone="warn"
      text="The reason stands beside the prompt, with a way to mend it."
    />
  );
}

/** In a page without a prompt the reason has no other place. */
function Unstarted() {
  const again = problem.value?.again;
  return (
    <Say title="The run did not start" tone="warn" text={sentence(problem.value?.message ?? "")}>
      {again && (
        <button type="button" onClick={again}>
          Try again
        </button>
      )}
      {run.value !== null && <Dismiss action={actions.dismiss} />}
    </Say>
  );
}

function Disconnected() {
  const broken = link.value === "broken";
  const kept = run.value?.origin === "live" ? " What was written stays, and the run will continue from there." : "";
  const hint = !reachable.value && run.value?.origin !== "live" ? " Start it with: tokenwright explore" : "";
  const text = (
    <>
      {broken ? <Countdown /> : "The page keeps asking."}
      {kept}
      {hint}
    </>
  );
  return (
    <Say title={broken ? "The connection is lost" : "The engine does not answer"} tone="bad" text={text}>
      {broken && (
        <button type="button" onClick={session.retryNow}>
          Try now
        </button>
      )}
      {run.value === null && <OpenTrace />}
    </Say>
  );
}

function Countdown() {
  const left = useSignal(0);
  const at = retryAt.value;
  useEffect(() => {
    const tell = () => (left.value = Math.max(0, Math.ceil((at - performance.now()) / 1000)));
    tell();
    const timer = setInterval(tell, 500);
    return () => clearInterval(timer);
  }, [at]);
  return <>{left.value > 0 ? `Trying again in ${left.value} s.` : "Trying again."}</>;
}

function Expired() {
  return (
    <Say
      title="The engine freed the cache of this run"
      tone="warn"
      text="It can be rebuilt from the text. The run then continues with the same tokens."
    >
      <button type="button" onClick={() => void session.revive()}>
        Rebuild it
      </button>
    </Say>
  );
}

function Replay() {
  const current = run.value;
  if (current === null || site.value !== null) return null; // a site says so in its bar
  return (
    <Banner
      title={`Replay of ${current.name}`}
      text={`Made by ${modelName(current.model.name)} on ${current.model.device}. Nothing is computed here.`}
    >
      {!alone.value && (
        <button type="button" onClick={session.leave}>
          <Icon name="close" /> Close
        </button>
      )}
    </Banner>
  );
}
