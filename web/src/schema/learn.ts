// Generated from src/tokenwright/explorer/panels/learn.py. Do not edit.

import type { Source, TokenCard } from "../schema";

export interface Fact {
  name: string;
  label: string;
  value: number | string | null;
  unit: string;
  source: Source;
  meaning: string;
}

export interface Field {
  name: string;
  label: string;
  kind: "whole" | "number" | "text" | "choice" | "head" | "streak";
  start: number | string;
  options: string[];
  least: number | null;
  most: number | null;
}

export interface ChallengeCard {
  id: string;
  number: number;
  card: string;
  title: string;
  task: string;
  target: string;
  fields: Field[];
}

export interface CardFacts {
  card: string;
  facts: Fact[];
}

export interface Lesson {
  challenges: ChallengeCard[];
  facts: CardFacts[];
}

export interface Checked {
  challenge: string;
  passed: boolean;
  message: string;
  facts: Fact[];
  streak: number;
}

export interface Losses {
  tokens: TokenCard[];
  losses: (number | null)[];
  facts: Fact[];
}
