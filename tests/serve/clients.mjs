// The clients of npm against a running server; test_clients.py runs it. By hand (Node 20 or newer):
//
//   tokenwright serve stories --port 8000
//   npm install --prefix build/clients openai @anthropic-ai/sdk ollama
//   cp tests/serve/clients.mjs build/clients/ && node build/clients/clients.mjs http://127.0.0.1:8000
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";

const url = process.argv[2];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const [{ id: model }] = (await openai.models.list()).data;
const messages = [{ role: "user", content: "Tell me a story." }];
const asked = { model, messages, max_tokens: 16, temperature: 0 };

const whole = (await openai.chat.completions.create(asked)).choices[0].message.content;
let streamed = "";
for await (const chunk of await openai.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, whole);

const response = await openai.responses.create({ model, input: messages, max_output_tokens: 16, temperature: 0 });
assert.equal(response.output_text, whole);
const kinds = [];
for await (const event of await openai.responses.create({ model, input: messages, stream: true, max_output_tokens: 16 })) {
  kinds.push(event.type);
}
assert.equal(kinds[0], "response.created");
assert.match(kinds.at(-1), /^response\.(completed|incomplete)$/);
const typo = { model, input: "x", stroe: true };
await assert.rejects(openai.responses.create(typo), { status: 400, param: "stroe" });

const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const message = await anthropic.messages.stream({ model, messages, max_tokens: 16 }).finalMessage();
assert.equal(message.content[0].type, "text");
await assert.rejects(anthropic.models.retrieve("none"), { status: 404 });

const ollama = new Ollama({ host: url });
const options = { temperature: 0, num_predict: 16 };
assert.equal((await ollama.chat({ model, messages, options })).message.content, whole);
let parts = "";
for await (const part of await ollama.chat({ model, messages, options, stream: true })) parts += part.message.content;
assert.equal(parts, whole);
console.log("all is as it should be");
