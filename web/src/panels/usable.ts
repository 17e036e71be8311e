// Which panels this page has.

import { alone, clustered, site } from "../visit/store";
import { engineHere } from "../visit/server";
import { PANELS, type Panel } from "./index";

/** A page without an engine has the panels that need none, and a site those that were recorded too. */
export const usable = (): readonly Panel[] =>
  PANELS.filter(({ clustered: only }) => !only || clustered.value)
    .filter(({ here, served }) => (engineHere() ? !served : !here))
    .filter(({ load, recorded }) => !alone.value || load === undefined || (recorded && site.value !== null));

/** What brings the engine in, on a page that has one. */
export const runIt = (): string => (alone.value ? "" : " Press Run.");
