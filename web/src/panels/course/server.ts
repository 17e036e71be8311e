// The course's calls to the engine in this page (web/course/answers.py).

import { call, post } from "../../visit/api";

export interface CourseLesson {
  id: string;
  title: string;
  text: string[]; // paragraphs
  start: string; // the cell
  answer: string; // a right one
}

export interface CourseCheck {
  passed: boolean;
  message: string;
  output: string; // what the cell and its check printed
  file: string; // the whole engine, once the last check passes
}

const LONGEST = 3_600_000; // ms; a reader stops what takes too long

export const lessons = (): Promise<{ lessons: CourseLesson[] }> => call("course");

/** solved: right cells, by lesson. */
export const check = (lesson: string, code: string, solved: Record<string, string>): Promise<CourseCheck> =>
  call("course/check", { ...post({ lesson, code, solved }), timeout: LONGEST });
