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
  { id: "learn", name: "Learn", title: "Eight cards, and 14 challenges that the engine checks", load: () => import("./learn") },
  { id: "race", name: "Race", title: "The same text with the KV cache and without it", load: () => import("./race") },
  { id: "branches", name: "Branches", title: "Go back and go on otherwise", load: () => import("./branches") },
  { id: "sampler", name: "Sampler", title: "Other settings on the same logits", load: () => import("./sampler") },
  {
    id: "block",
    name: "Block",
    title: "One token on its way through one layer: vectors, norms, FLOPs",
    load: () => import("./Block"),
  },
  { id: "heads", name: "Heads", title: "Every head, named by what it does; a matrix; the lens", load: () => import("./Heads") },
  { id: "pages", name: "Pages", title: "The pages of the KV cache, and who shares them", load: () => import("./Pages") },
  { id: "lab", name: "Lab", title: "The same text with less of K and V kept", load: () => import("./Lab") },
  { id: "beams", name: "Beams", title: "A beam search as a tree", load: () => import("./Beams") },
  {
    id: "calculator",
    name: "Calculator",
    title: "Memory and speed at any context, batch and format",
    load: () => import("./Calculator"),
  },
];
