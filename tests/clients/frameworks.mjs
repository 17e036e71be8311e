// Frameworks of npm: each calls its tool twice, then has the answer. node frameworks.mjs URL
import { ChatOpenAI } from "@langchain/openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createSupervisor } from "@langchain/langgraph-supervisor";
import { stepCountIs, streamText, tool } from "ai";
import { createAgent, tool as chainTool } from "langchain";
import { z } from "zod";

const base = `${process.argv[2]}/v1`;
const asked = "How is the weather in Oslo and Rome?";
const settings = { baseURL: base, apiKey: "none" };
const city = z.object({ city: z.string() });
const weather = async ({ city }) => `warm in ${city}`;

async function sdk(model) {
  const tools = { weather: tool({ description: "The weather", inputSchema: city, execute: weather }) };
  const run = streamText({ model, tools, prompt: asked, stopWhen: stepCountIs(5), onError: () => {} });
  const results = (await run.steps).flatMap((step) => step.toolResults.map((result) => result.output));
  return [...results, await run.text];
}

const chat = (more) => new ChatOpenAI({ model: "tiny", apiKey: "none", configuration: settings, ...more });
const forecaster = (more) =>
  createAgent({
    model: chat(more),
    tools: [chainTool(weather, { name: "weather", description: "The weather", schema: city })],
    name: "forecaster",
  });

async function chain(agent) {
  const { messages } = await agent.invoke({ messages: [{ role: "user", content: asked }] });
  const last = messages.at(-1).content;
  const results = messages.filter((message) => message.type === "tool").map((message) => message.content);
  return [...results, typeof last === "string" ? last : last[0].text];
}

const frameworks = {
  "Vercel AI SDK, responses": () => sdk(createOpenAI(settings)("tiny")),
  "Vercel AI SDK, chat": () => sdk(createOpenAI(settings).chat("tiny")),
  "Vercel AI SDK, compatible": () => sdk(createOpenAICompatible({ name: "own", ...settings })("tiny")),
  "Vercel AI SDK, Anthropic": () => sdk(createAnthropic(settings)("tiny")),
  "LangChain.js createAgent": () => chain(forecaster()),
  "LangChain.js createAgent, responses": () => chain(forecaster({ useResponsesApi: true })),
  "LangGraph.js supervisor": () => chain(createSupervisor({ agents: [forecaster().graph], llm: chat() }).compile()),
};
const found = {};
for (const [name, run] of Object.entries(frameworks)) found[name] = await run();
console.log(JSON.stringify(found));
