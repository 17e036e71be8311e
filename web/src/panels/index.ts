// The panels: what can be opened in the rail's place, beside the live stage. Each is a module of its own in this folder,
// loaded when it is first opened; a line here is all that another one needs.

import type { ComponentType } from "preact";

export interface Panel {
  id: string; // in links: #panel=id
  name: string; // on its button
  title: string; // what it is for, in a sentence
  load: () => Promise<{ default: ComponentType }>;
}

export const PANELS: readonly Panel[] = [
  { id: "learn", name: "Learn", title: "Eight cards, and 15 challenges that the engine checks", load: () => import("./learn") },
  { id: "race", name: "Race", title: "The same text with the KV cache and without it", load: () => import("./race") },
  { id: "branches", name: "Branches", title: "Continue from any step with another token", load: () => import("./branches") },
  { id: "sampler", name: "Sampler", title: "Other sampling settings on the logits of this step", load: () => import("./sampler") },
  {
    id: "block",
    name: "Block",
    title: "One token on its way through one layer: vectors, norms, FLOPs",
    load: () => import("./Block"),
  },
  { id: "heads", name: "Heads", title: "What each attention head reads; the matrix of one; each layer’s guess", load: () => import("./Heads") },
  { id: "pages", name: "Pages", title: "The pages of the KV cache, and which texts share them", load: () => import("./Pages") },
  { id: "lab", name: "Lab", title: "The same text with a smaller KV cache", load: () => import("./Lab") },
  { id: "beams", name: "Beams", title: "A beam search as a tree", load: () => import("./Beams") },
  {
    id: "calculator",
    name: "Calculator",
    title: "The memory and the speed of a model at any context",
    load: () => import("./Calculator"),
  },
];
