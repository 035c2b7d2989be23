// Data that the stream does not carry (it comes from SQL): asked for again while a page is open and
// visible, and not while an answer is under way.

import { ask, live } from "./state.js";

export function poll(path, period, took) {
  let timer;
  let ended = false;
  let mine = 0;
  const state = { data: null, fault: "", again };
  async function again() {
    clearTimeout(timer);
    const number = (mine += 1);
    if (!document.hidden && (live.link === "live" || live.link === "stale" || !state.data)) {
      try {
        const data = await ask(typeof path === "function" ? path() : path);
        if (ended || number !== mine) return;
        [state.data, state.fault] = [data, ""];
      } catch (error) {
        if (ended || number !== mine) return;
        state.fault = error.name === "TypeError" ? "The server does not answer." : error.message;
      }
      took();
    }
    if (!ended && number === mine) timer = setTimeout(again, period);
  }
  state.end = () => { ended = true; clearTimeout(timer); };
  again();
  return state;
}

/** What to show without telemetry. */
export const OFF = ["Telemetry is off in this job, so there are no records. Start the script with ", "MONARCH_TELEMETRY=1", ", or call ", "job.enable_telemetry()", "."];
