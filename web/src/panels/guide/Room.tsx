// A class in the guide: the teacher's scene leads, the pupils' pages follow it, and the teacher sees their answers. Each
// side says all that it has, again and again: a lost answer is said once more.

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { nearby } from "../../visit/address";
import { call, post } from "../../visit/api";
import { engineHere } from "../../visit/server";
import { live, room } from "../../visit/store";
import { plural, sentence } from "../../ui/format";
import { save } from "../../run/exports";
import { done, seen } from "../learn/progress";
import type { Pupil, RoomAnswer } from "../../schema/room";
import { at, guesses } from "./guesses";
import { SCENES } from "./script";

const EVERY = 1500; // ms
const [NAME, TEXT, ANSWERS] = [24, 40, 32]; // what the server takes

/** Random, and the same after a reload of the tab. */
function own(name: string): string {
  const key = `tokenwright.${name}`;
  const known = sessionStorage.getItem(key);
  if (known !== null) return known;
  const made = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0"));
  sessionStorage.setItem(key, made.join(""));
  return made.join("");
}

const name = signal(sessionStorage.getItem("tokenwright.name") ?? "");
const pupils = signal<readonly Pupil[]>([]);
const trouble = signal("");
let fresh = false; // the room is to be emptied
let led = ""; // the scene that was followed last

const answers = (): RoomAnswer[] =>
  [...guesses.value]
    .filter(([, { given }]) => given !== null)
    .map(([scene, { given, ok }]) => ({ scene, text: String(given).slice(0, TEXT), right: ok }))
    .slice(0, ANSWERS);

/** What was solved and guessed, as a file to hand in. */
export function saveProgress(): void {
  const told = { name: name.value, saved: new Date().toISOString(), read: seen.value, solved: done.value };
  const content = JSON.stringify({ ...told, answers: answers() }, null, 1);
  save(new Blob([content], { type: "application/json" }), "progress.json");
}

async function teach(): Promise<void> {
  const body = { secret: own("secret"), scene: SCENES[at.value]?.id, fresh };
  const found = await call<Pupil[]>("room/teacher", post(body));
  fresh = false;
  pupils.value = found;
}

async function join(go: (index: number) => void): Promise<void> {
  const body: Pupil = {
    identity: own("pupil"),
    name: name.value,
    solved: Math.min(99, done.value.length),
    answers: answers(),
  };
  const { scene } = await call<{ scene: string }>("room/pupil", post(body));
  const index = SCENES.findIndex(({ id }) => id === scene);
  if (scene === led || index < 0) return;
  led = scene;
  if (index !== at.value) go(index);
}

export function Room({ scene, go }: { scene: string; go: (index: number) => void }) {
  const role = room.value;
  const ready = live.value && !engineHere() && (role === "teach" || (role === "join" && name.value !== ""));
  useEffect(() => {
    if (!ready) return;
    let timer: ReturnType<typeof setTimeout> | undefined;
    let gone = false;
    const ask = async (): Promise<void> => {
      try {
        await (role === "teach" ? teach() : join(go));
        trouble.value = "";
      } catch (error) {
        trouble.value = sentence((error as Error).message);
      }
      if (!gone) timer = setTimeout(() => void ask(), EVERY);
    };
    void ask();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [ready, role, scene]);
  if (!live.value || engineHere()) return null;
  return (
    <div class="guide-room">
      {role === "teach" ? <Teaching scene={scene} /> : role === "join" ? <Joining /> : scene === "loop" && <Begin />}
      {trouble.value !== "" && role !== null && <p class="guide-verdict wrong">{trouble.value}</p>}
    </div>
  );
}

const Begin = () => (
  <button type="button" class="quiet" onClick={() => (room.value = "teach")}>
    Teach a class with this
  </button>
);

function Joining() {
  if (name.value !== "")
    return (
      <p role="status">
        In the class as <b translate={false}>{name.value}</b>. The teacher turns the pages.
      </p>
    );
  const submit = (event: SubmitEvent): void => {
    event.preventDefault();
    const given = String(new FormData(event.currentTarget as HTMLFormElement).get("name"))
      .trim()
      .slice(0, NAME);
    sessionStorage.setItem("tokenwright.name", given);
    name.value = given;
  };
  return (
    <form class="guide-question" onSubmit={submit}>
      <label for="guide-name">Your name, for the teacher’s screen</label>
      <div class="guide-answer">
        <input id="guide-name" name="name" maxLength={NAME} autocomplete="nickname" required />
        <button type="submit" class="bright">
          Join the class
        </button>
      </div>
    </form>
  );
}

/** For the room to see: the address, how this scene's question was answered, and by whom what was solved. */
function Teaching({ scene }: { scene: string }) {
  const all = pupils.value;
  const here = all.flatMap((pupil) => pupil.answers.filter((one) => one.scene === scene));
  const tally = new Map<string, { times: number; right: boolean }>();
  for (const { text, right } of here) tally.set(text, { times: (tally.get(text)?.times ?? 0) + 1, right });
  const most = [...tally].sort(([, a], [, b]) => b.times - a.times).slice(0, 8);
  return (
    <>
      <p>
        Class at <b class="guide-room-address">{`${location.origin}${location.pathname}#room`}</b>
        {nearby && (
          <>
            , which only this machine reaches. For phones start <code>tokenwright serve --host 0.0.0.0</code>
          </>
        )}
      </p>
      <p role="status">
        {plural(all.length, "pupil")}. {here.length} answered here, {here.filter(({ right }) => right).length} right.
      </p>
      {most.length > 0 && (
        <ul class="guide-tally">
          {most.map(([text, { times, right }]) => (
            <li key={text} class={right ? "right" : ""}>
              <b translate={false}>{text}</b>: {plural(times, "pupil")}
              {right && " ✓"}
            </li>
          ))}
        </ul>
      )}
      <details>
        <summary>Who has solved what</summary>
        <ul class="guide-pupils">
          {all.map(({ identity, name: called, solved, answers: given }) => (
            <li key={identity}>
              <b translate={false}>{called}</b> {given.filter(({ right }) => right).length} of {given.length} guesses
              right, {plural(solved, "challenge")} solved
            </li>
          ))}
        </ul>
        <button type="button" onClick={() => (fresh = true)}>
          Empty the room
        </button>
      </details>
    </>
  );
}
