// Where the chat page begins. It shares the look of the explorer and the types of the server, and nothing else.

import { render } from "preact";
import { loading } from "../language/language";
import { start } from "./store";
import { Chat } from "./ui/Chat";
import "../visit/theme";
import "../style/roles.css";
import "../style/base.css";
import "../style/top.css";
import "../style/numbers.css";
import "../style/chat.css";

function begin(): void {
  const root = document.getElementById("app");
  root?.replaceChildren();
  if (root) render(<Chat />, root);
  void start();
}

if (loading) void loading.then(begin);
else begin();
