// Generated from src/tokenwright/explorer/panels/chat.py. Do not edit.

import type { TokenCard } from "../schema";

export interface ChatModel {
  name: string;
  template: boolean;
  traced: boolean;
  context: number;
  temperature: number;
  top_k: number;
  top_p: number;
  kind: "chat";
}

export interface ChatPrompt {
  text: string;
  tokens: TokenCard[];
  pictures: string;
  kind: "prompt";
}
