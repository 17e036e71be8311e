// Numbers for people. The exact value is always in the DOM beside what is shown (see ui/Stat); these say how much of it
// is worth reading. Memory is in binary units (KiB = 1024 B), work in decimal ones (1 MFLOP = 10^6), never mixed.

import { language } from "../language/language";

type Amount = number | bigint;

const NONE = "–";
const LOCALE = language === "en" ? "en-US" : language;
const GROUPED = new Intl.NumberFormat(LOCALE); // one for all: a call of toLocaleString makes its own
const TO_DIGITS = [0, 1, 2].map(
  (digits) => new Intl.NumberFormat(LOCALE, { minimumFractionDigits: digits, maximumFractionDigits: digits }),
);
const part = (type: string): string => GROUPED.formatToParts(1234567.8).find((one) => one.type === type)?.value ?? "";
const [GROUP, POINT] = [part("group"), part("decimal")];
const ROUNDING = 1e-6; // what two orders of the same sum may differ by

/** Three figures that matter: 1.23, 12.3, 123, 1,234. */
export function figures(value: number): string {
  const size = Math.abs(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2;
  return TO_DIGITS[digits]!.format(value);
}

/** A number as JavaScript writes it, with the decimal point of the page's language. */
export const pointed = (text: string): string => text.replace(".", POINT);

/** A number that a person wrote. */
export const numberOf = (text: string): number => Number(text.replaceAll(GROUP, "").replace(POINT, "."));

export function count(value: Amount): string {
  return GROUPED.format(value);
}

function scaled(value: Amount, base: number, units: readonly string[]): [string, string] {
  let size = Number(value);
  let unit = 0;
  while (Math.abs(size) >= base && unit < units.length - 1) {
    size /= base;
    unit++;
  }
  return [figures(size), units[unit] ?? ""];
}

export const bytes = (value: Amount): [string, string] => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
export const flop = (value: Amount): [string, string] =>
  scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);
export const micros = (value: Amount): [string, string] => scaled(value, 1000, ["µs", "ms", "s"]);

/** Two digits after the point, or two that say something. */
function small(value: number): string {
  if (Math.abs(value) < ROUNDING) return pointed("0.00");
  return pointed(Math.abs(value) < 0.095 ? value.toPrecision(2) : value.toFixed(2));
}

/** A value in the unit of its kind: the figures and the unit apart, so that they can be set apart. */
export function shown(value: Amount | boolean | null, unit: string): [string, string] {
  if (value === null) return [NONE, ""];
  if (typeof value === "boolean") return [value ? "on" : "off", ""];
  switch (unit) {
    case "B":
      return bytes(value);
    case "FLOP":
      return flop(value);
    case "us":
      return micros(value);
    case "bit":
    case "nat":
      return [small(Number(value)), unit];
    case "nat per token":
      return [small(Number(value)), unit];
    case "logit":
      return [pointed(Number(value).toPrecision(2)), ""];
    case "%":
      return [figures(Number(value)), unit];
    case "share":
      return [pointed(Number(value).toFixed(4)), ""];
    case "times":
      return [figures(Number(value)), "×"];
    case "tok/s":
      return [figures(Number(value)), unit];
    case "index":
      return [typeof value === "bigint" ? count(value + 1n) : numbered(value), ""];
    case "tokens":
      return [count(value), Number(value) === 1 ? "token" : "tokens"];
    default:
      return [count(value), unit];
  }
}

/** The number of a step, or of a token of the text: the engine counts them from 0, the page from 1. */
export const numbered = (index: number): string => count(index + 1);

export const joined = ([figure, unit]: [string, string]): string => (unit === "" ? figure : `${figure} ${unit}`);

/** To a tenth, for shares that are added up. */
export const exactPercent = (share: number): string => `${pointed((100 * share).toFixed(1))} %`;

export function percent(share: number): string {
  const value = share * 100;
  if (value > 0 && value < 0.1) return `<${pointed("0.1")} %`;
  if (value < 100 && value > 99.9) return `>${pointed("99.9")} %`;
  return `${pointed(value.toFixed(value < 10 || (value > 99 && value < 100) ? 1 : 0))} %`;
}

/** A model's name without the folders of a path; one of the hub keeps its owner. */
export const modelName = (name: string): string =>
  /^[./~\\]|^[A-Za-z]:/.test(name) ? (name.split(/[/\\]/).findLast((part) => part !== "") ?? name) : name;

/** A number of weights: 5.8 M, 1.24 B. */
export const weights = (value: number): string =>
  value >= 1e9 ? `${figures(value / 1e9)} B` : value >= 1e6 ? `${figures(value / 1e6)} M` : count(value);

export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** 1st, 2nd, 3rd, 4th, 11th, 21st. */
export function ordinal(value: number): string {
  if (language !== "en") return `${count(value)}.`;
  const [tens, ones] = [Math.floor(value / 10) % 10, value % 10];
  const ending = tens === 1 ? "th" : (["th", "st", "nd", "rd"][ones] ?? "th");
  return `${count(value)}${ending}`;
}

/** A message of the engine, which begins small and ends bare, as a sentence of the page. */
export function sentence(text: string): string {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.?]$/.test(begun) ? begun : `${begun}.`;
}
