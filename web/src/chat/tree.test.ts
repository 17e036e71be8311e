import { expect, test } from "vitest";
import { before, begin, change, grow, messages, path, place, prompt, title, turnTo } from "./tree";

const texts = (turns: { text: string }[]) => turns.map(({ text }) => text);

function talk() {
  let conversation = begin("a", "Be brief.", 0);
  let [user, answer] = [0, 0];
  [conversation, user] = grow(conversation, 0, "user", { text: "Hello there, you" });
  [conversation, answer] = grow(conversation, user, "assistant", { text: "Hi" });
  return { conversation, user, answer };
}

test("an answer that is regenerated, and a message that is edited, are siblings", () => {
  let { conversation, user, answer } = talk();
  let again = 0;
  [conversation, again] = grow(conversation, user, "assistant", { text: "Good day" });
  expect(texts(path(conversation))).toEqual(["Hello there, you", "Good day"]);
  expect(place(conversation, again)).toEqual({ index: 1, count: 2 });
  conversation = turnTo(conversation, again, -1);
  expect(texts(path(conversation))).toEqual(["Hello there, you", "Hi"]);
  expect(turnTo(conversation, answer, -1)).toEqual(turnTo(conversation, answer, 1)); // round at the ends
  const [edited, other] = grow(conversation, 0, "user", { text: "Who?" });
  expect(texts(path(edited))).toEqual(["Who?"]);
  expect(texts(path(turnTo(edited, other, -1)))).toEqual(["Hello there, you", "Hi"]); // with its own branch
});

test("what an answer is written from is its own branch, whichever is followed", () => {
  let { conversation, user, answer } = talk();
  let more = 0;
  [conversation, more] = grow(conversation, answer, "user", { text: "More" });
  const [next, last] = grow(conversation, more, "assistant");
  const asked = messages(next, last, "Be kind.");
  expect(asked.map(({ role }) => role)).toEqual(["system", "user", "assistant", "user"]);
  expect(asked.map(({ content }) => content)).toEqual(["Be kind.", "Hello there, you", "Hi", "More"]);
  const [branched] = grow(next, user, "assistant", { text: "Elsewhere" });
  expect(messages(branched, last, "Be kind.")).toEqual(asked);
  expect(messages(branched, last, "")).toEqual(asked.slice(1));
  expect(prompt(branched, last)).toBe("Hello there, youHiMore");
  expect(texts(before(branched, user))).toEqual([]);
});

test("a change touches one turn, and the title is the beginning", () => {
  const { conversation, answer } = talk();
  const changed = change(conversation, answer, { text: "Hi!", state: "done" });
  expect(texts(path(changed))).toEqual(["Hello there, you", "Hi!"]);
  expect(texts(path(conversation))).toEqual(["Hello there, you", "Hi"]);
  expect(title(changed)).toBe("Hello there, you");
  expect(title(begin("b", "", 0))).toBe("");
});
