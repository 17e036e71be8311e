// Figures of the lesson, each with its badge.

import { Figure } from "../../ui/Stat";
import type { Fact } from "../../schema/learn";

export function Facts({ of, prefix }: { of: readonly Fact[]; prefix: string }) {
  return (
    <dl class="learn-facts">
      {of.map((fact) => (
        <div key={fact.name}>
          <dt>{fact.label}</dt>
          <dd>
            <Value fact={fact} prefix={prefix} />
          </dd>
        </div>
      ))}
    </dl>
  );
}

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
