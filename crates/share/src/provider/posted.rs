//! The requests that are in flight on one queue of a queue pair.
//!
//! The node and its device know a request by its place in the queue. So the number that the program chose never leaves this process, and a
//! completion says how many requests before it are done: those that asked for no completion. To learn that also from a program that never asks
//! for one, some requests ask on behalf of the queue.

use std::collections::VecDeque;

/// One request of so many of a queue, which asked for no completion, asks for one on behalf of the queue.
const ASKS_PER_QUEUE: u32 = 4;

/// A request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request<T> {
    /// Number of the program's choice.
    pub(super) wr_id: u64,
    /// Set if the program asked for a completion on success.
    pub(super) asked: bool,
    /// Its kind.
    pub(super) kind: T,
}

/// Place of a request, and whether it is to ask for a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) number: u64,
    pub(super) asks: bool,
}

/// The requests of a queue that are not complete.
#[derive(Debug)]
pub(super) struct Posted<T> {
    /// `None`: complete, behind one that is not.
    requests: VecDeque<Option<Request<T>>>,
    /// Number of the first one.
    first: u64,
    max: u32,
    /// Requests since the last one that asks for a completion.
    quiet: u32,
}

impl<T: Copy> Posted<T> {
    /// Makes a queue for at most `max` requests.
    pub(super) fn new(max: u32) -> Posted<T> {
        Posted {
            requests: VecDeque::new(),
            first: 0,
            max,
            quiet: 0,
        }
    }

    /// Adds a request; `None` if the queue is full.
    pub(super) fn push(&mut self, request: Request<T>) -> Option<Place> {
        if self.requests.len() >= self.max as usize {
            return None;
        }
        self.quiet += 1;
        let asks = request.asked || self.quiet >= (self.max / ASKS_PER_QUEUE).max(1);
        if asks {
            self.quiet = 0;
        }
        let number = self.first + self.requests.len() as u64;
        self.requests.push_back(Some(request));
        Some(Place { number, asks })
    }

    /// Removes the request that was added last, which did not leave. The next one asks for a completion, in case this one was to.
    pub(super) fn take_back(&mut self) {
        self.requests.pop_back();
        self.quiet = self.quiet.max(self.max / ASKS_PER_QUEUE);
    }

    /// Completes the request at a place, and with it all before it that asked for no completion. `None`: there is none.
    pub(super) fn complete(&mut self, number: u64) -> Option<Request<T>> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let request = self.requests.get_mut(at)?.take()?;
        let mut before = at;
        // The last request is at the front at the latest when all before it are done.
        while let Some(front) = self.requests.front() {
            let is_done = match front {
                None => true,
                Some(front) => before > 0 && !front.asked,
            };
            if !is_done {
                break;
            }
            self.requests.pop_front();
            self.first += 1;
            before = before.saturating_sub(1);
        }
        Some(request)
    }

    /// Removes all requests, and returns them in their order.
    pub(super) fn flush(&mut self) -> Vec<Request<T>> {
        self.first += self.requests.len() as u64;
        self.quiet = 0;
        self.requests.drain(..).flatten().collect()
    }

    /// Returns the number of requests that take room.
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(wr_id: u64, asked: bool) -> Request<()> {
        Request {
            wr_id,
            asked,
            kind: (),
        }
    }

    #[test]
    fn complete__frees_what_asked_for_nothing_before_it() {
        let mut posted = Posted::new(8);
        for (wr_id, asked) in [(10, true), (11, false), (12, false), (13, true)] {
            let place = posted.push(request(wr_id, asked)).unwrap();
            assert_eq!(place.number, wr_id - 10);
        }
        assert_eq!(posted.complete(0), Some(request(10, true)));
        assert_eq!(posted.len(), 3);
        assert_eq!(posted.complete(3), Some(request(13, true)));
        assert_eq!((posted.len(), posted.complete(3)), (0, None));
    }

    #[test]
    fn complete__out_of_order_keeps_those_that_asked() {
        let mut posted = Posted::new(8);
        for n in 0..4 {
            posted.push(request(n, true));
        }
        assert_eq!(posted.complete(2), Some(request(2, true)));
        assert_eq!(posted.len(), 4);
        assert_eq!(posted.complete(0), Some(request(0, true)));
        assert_eq!(posted.complete(1), Some(request(1, true)));
        assert_eq!(posted.len(), 1);
    }

    #[test]
    fn complete__places_of_no_request() {
        let mut posted = Posted::new(8);
        posted.push(request(0, true));
        for number in [1, u64::MAX] {
            assert_eq!(posted.complete(number), None);
        }
    }

    #[test]
    fn push__asks_often_enough_for_a_program_that_never_asks() {
        for max in [1, 2, 3, 16, 100] {
            let mut posted = Posted::new(max);
            let mut last_asked = None;
            for n in 0..1000 {
                let place = posted.push(request(n, false)).or_else(|| {
                    posted.complete(last_asked.take()?)?;
                    posted.push(request(n, false))
                });
                let place = place.expect("there is room once what asked is complete");
                if place.asks {
                    last_asked = Some(place.number);
                }
            }
        }
    }

    #[test]
    fn take_back__of_each_that_asks() {
        for max in [1, 2, 3, 16, 100] {
            let mut posted = Posted::new(max);
            let mut asks = 0;
            while let Some(place) = posted.push(request(0, false)) {
                if place.asks {
                    posted.take_back();
                    asks += u32::from(posted.push(request(0, false)).unwrap().asks);
                }
            }
            assert!(asks > 0, "a queue that nothing makes room in");
        }
    }

    #[test]
    fn flush__all_in_their_order() {
        let mut posted = Posted::new(4);
        for n in 0..4 {
            posted.push(request(n, n % 2 == 0));
        }
        assert_eq!(posted.push(request(9, true)), None);
        posted.complete(2);
        let flushed: Vec<u64> = posted.flush().iter().map(|request| request.wr_id).collect();
        assert_eq!(flushed, [0, 1, 3]);
        assert_eq!(posted.push(request(9, true)).unwrap().number, 4);
    }
}
