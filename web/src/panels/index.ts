// The panels of the drawer, in five groups. Each is a module of its own in this folder, loaded when it is first opened;
// the two without one stand in the document at all times. A line here is all that another one needs.

import type { ComponentType } from "preact";

export const GROUPS = ["Learn", "Code", "Numbers", "Look inside", "Experiments"] as const;

export interface Panel {
  id: string; // in links: #panel=id
  group: (typeof GROUPS)[number] | "Guide";
  name: string; // on its button
  title: string; // what it is for, in a sentence
  load?: () => Promise<{ default: ComponentType }>; // it asks the engine
  recorded?: true; // a site of recorded runs has its answers
  clustered?: true; // only a server of replicas has it
  here?: true; // only a page with the engine in it has it
  served?: true; // only a server has it: it tells of the server's clients
}

export const PANELS: readonly Panel[] = [
  {
    id: "guide",
    group: "Guide",
    name: "The idea in ten minutes",
    title: "Fourteen scenes on the stage, each with a guess that the engine checks",
    load: () => import("./guide"),
  },
  {
    id: "learn",
    group: "Learn",
    name: "Learn",
    title: "Eight cards, and 15 challenges that the engine checks",
    recorded: true,
    load: () => import("./learn"),
  },
  {
    id: "course",
    group: "Learn",
    name: "Course",
    title: "Build this engine: seven lessons in Python, run in this page",
    here: true,
    load: () => import("./course"),
  },
  {
    id: "code",
    group: "Code",
    name: "Code",
    title: "The code of this step, with the cache and without",
    recorded: true,
    load: () => import("./code"),
  },
  { id: "numbers", group: "Numbers", name: "Numbers", title: "All numbers of the shown step, and of the run" },
  { id: "next", group: "Look inside", name: "Next token", title: "The candidates, the draw, and what one head read" },
  {
    id: "block",
    group: "Look inside",
    name: "Block",
    title: "One token on its way through one layer: vectors, norms, FLOPs",
    load: () => import("./Block"),
  },
  {
    id: "heads",
    group: "Look inside",
    name: "Heads",
    title: "What each attention head reads; the matrix of one; each layer’s guess",
    load: () => import("./Heads"),
  },
  {
    id: "sampler",
    group: "Look inside",
    name: "Sampler",
    title: "Other sampling settings on the logits of this step",
    load: () => import("./sampler"),
  },
  {
    id: "branches",
    group: "Look inside",
    name: "Branches",
    title: "Continue from any step with another token",
    load: () => import("./branches"),
  },
  {
    id: "beams",
    group: "Look inside",
    name: "Beams",
    title: "A beam search as a tree",
    recorded: true,
    load: () => import("./Beams"),
  },
  {
    id: "race",
    group: "Experiments",
    name: "Race",
    title: "The same text with the KV cache and without it",
    recorded: true,
    load: () => import("./race"),
  },
  {
    id: "lab",
    group: "Experiments",
    name: "Lab",
    title: "The same text with a smaller KV cache",
    load: () => import("./Lab"),
  },
  {
    id: "drafts",
    group: "Experiments",
    name: "Drafts",
    title: "The same text in fewer steps: guesses that are kept, or fall",
    recorded: true,
    load: () => import("./Drafts"),
  },
  {
    id: "pages",
    group: "Experiments",
    name: "Pages",
    title: "The pages of the KV cache, and which texts share them",
    recorded: true,
    load: () => import("./Pages"),
  },
  {
    id: "conversations",
    group: "Experiments",
    name: "Conversations",
    title: "What the cache found of each turn, and why not more",
    served: true,
    load: () => import("./Conversations"),
  },
  {
    id: "calculator",
    group: "Experiments",
    name: "Calculator",
    title: "The memory and the speed of a model at any context",
    load: () => import("./Calculator"),
  },
  {
    id: "replicas",
    group: "Experiments",
    name: "Replicas",
    title: "The replicas of this server, and the ways of texts through them",
    clustered: true,
    load: () => import("./Replicas"),
  },
];
