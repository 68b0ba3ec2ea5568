//! Growing pauses between attempts.

use std::time::Duration;

/// Pauses that double up to `longest`. Each is shortened by a jitter that keeps clients from coming back all at once.
#[derive(Debug)]
pub(crate) struct Pauses {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Pauses {
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    pub fn next(&mut self) -> Duration {
        let pause = self.next;
        self.next = (2 * pause).min(self.longest);
        let random = f64::from(getrandom::u32().unwrap_or(u32::MAX)) / f64::from(u32::MAX);
        pause.mul_f64(0.5 + random / 2.0)
    }

    pub fn start_over(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_over() {
        let mut pauses = Pauses::new(Duration::from_millis(100), Duration::from_millis(300));
        for most in [100, 200, 300, 300] {
            let most = Duration::from_millis(most);
            let pause = pauses.next();
            assert!(pause >= most / 2 && pause <= most, "{pause:?} of {most:?}");
        }
        pauses.start_over();
        assert!(pauses.next() <= Duration::from_millis(100));
    }
}
