// Where the page begins: the parts are connected, the address is read, the first minute starts.

import { render } from "preact";
import * as address from "./visit/address";
import * as clock from "./visit/clock";
import { install } from "./visit/test-probe";
import { listen } from "./visit/keys";
import { loading } from "./language/language";
import { acknowledge } from "./visit/live";
import { take } from "./run/play/player";
import { boot, follow, openSite, openTrace, playAlone, visit } from "./visit/session";
import type { Site } from "./visit/store";
import { App } from "./ui/App";
import "./style/roles.css";
import "./style/base.css";
import "./style/top.css";
import "./style/numbers.css";
import "./style/layout.css";
import "./style/prompt.css";
import "./style/stage.css";
import "./style/work.css";
import "./style/flight.css";
import "./style/overlay.css";
import "./style/text.css";
import "./style/transport.css";
import "./style/help.css";
import "./style/rail.css";
import "./style/screens.css";
import "./style/embed.css";

clock.parts.take = take;
clock.parts.rendered = acknowledge;

/** Once the page's language is there. */
function start(): void {
  const wanted = address.read();
  const root = document.getElementById("app");
  root?.replaceChildren(); // the bar that the document shows before this program is here
  if (root) render(<App />, root);
  install();
  listen();
  const [trace, site] = [within("trace"), within("site")];
  if (trace !== "") playAlone(trace);
  else if (site !== "") {
    address.listen((link) => void (link.run && visit(link.run, link)));
    void openSite(JSON.parse(site) as Site, wanted).finally(address.keep);
  } else {
    address.listen((link) => void follow(link));
    void boot(wanted).finally(address.keep);
  }
}

addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer) void bringIn(event.dataTransfer);
});

async function bringIn(given: DataTransfer): Promise<void> {
  const { dropped, isModel, offerModel } = await import("./visit/own-model");
  const files = await dropped(given);
  if (isModel(files)) return offerModel(files);
  if (files[0]) return openTrace(files[0]);
}

/** The text of an element that a file or a site has, and a server's page lacks. */
const within = (id: string): string => document.getElementById(id)?.textContent ?? "";

if (loading) void loading.then(start);
else start();
