// Generated from src/tokenwright/explorer/room.py. Do not edit.

export interface RoomAnswer {
  scene: string;
  text: string;
  right: boolean;
}

export interface Pupil {
  identity: string;
  name: string;
  solved: number;
  answers: RoomAnswer[];
}

export interface Teacher {
  secret: string;
  scene: string;
  fresh: boolean;
}
