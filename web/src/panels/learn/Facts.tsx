// Figures of the lesson, each with its badge.

import { Figure } from "../../ui/Stat";
import type { Fact } from "../../schema/learn";

export function Facts({ of, prefix }: { of: readonly Fact[]; prefix: string }) {
  return (
    <dl class="learn-facts">
      {of.map((fact) => (
        <div key={fact.name} class={isText(fact) ? "learn-fact-text" : ""}>
          <dt>{fact.label}</dt>
          <dd>
            <Value fact={fact} prefix={prefix} />
          </dd>
        </div>
      ))}
    </dl>
  );
}

const NUMBER = 24; // characters up to which a word stands where a number would

/** Whether a figure is a text, which has lines of its own. */
const isText = ({ value }: Fact): boolean => typeof value === "string" && value.length > NUMBER;

export function Value({ fact, prefix }: { fact: Fact; prefix: string }) {
  const name = `${prefix}_${fact.name}`;
  if (typeof fact.value === "string")
    return (
      <span class="learn-word" title={fact.meaning} data-stat={name} data-value={fact.value} data-src={fact.source}>
        {fact.value}
      </span>
    );
  return <Figure name={name} value={fact.value} source={fact.source} unit={fact.unit} meaning={fact.meaning} />;
}
