// In a run what the bar shows comes with the timeline's message, so that both are one message and one frame of the page: the
// event by which the timeline tells the bar, with traits of the bar by name.
export const CARRIED = "wb-carried";
