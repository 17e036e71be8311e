// Where the page begins: the parts are connected, the address is read, the first minute starts.

import { render } from "preact";
import * as address from "./address";
import * as clock from "./clock";
import { install } from "./hook";
import { listen } from "./keys";
import { acknowledge } from "./live";
import { take } from "./player";
import { boot, follow, openTrace, playAlone } from "./session";
import { App } from "./ui/App";
import "./style/roles.css";
import "./style/base.css";
import "./style/top.css";
import "./style/numbers.css";
import "./style/layout.css";
import "./style/prompt.css";
import "./style/stage.css";
import "./style/overlay.css";
import "./style/text.css";
import "./style/transport.css";
import "./style/help.css";
import "./style/screens.css";
import "./style/rail.css";
import "./style/embed.css";

clock.parts.take = take;
clock.parts.rendered = acknowledge;

const wanted = address.read();
const root = document.getElementById("app");
root?.replaceChildren(); // the bar that the document shows before this program is here
if (root) render(<App />, root);
install();
listen();

addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  const file = event.dataTransfer?.files[0];
  if (file) void openTrace(file);
});

const inside = document.getElementById("trace")?.textContent ?? ""; // of a file that plays alone
if (inside === "") {
  address.listen((link) => void follow(link));
  void boot(wanted).finally(address.keep);
} else playAlone(inside);
