// Which panels this page has.

import { alone, model, site } from "../store";
import { PANELS, type Panel } from "./index";

/** A page without an engine has the panels that need none, and a site those that were recorded too. */
export const usable = (): readonly Panel[] =>
  PANELS.filter(({ clustered }) => !clustered || (model.value?.replicas ?? 0) > 0).filter(
    ({ load, recorded }) => !alone.value || load === undefined || (recorded && site.value !== null),
  );
