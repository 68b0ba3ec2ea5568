//! Conversions between values of the schema and values of the language.

use std::time::Duration;

use crate::v1::{BlockRuns, Blocks, GroupBlocks};

/// Returns the duration as the schema has it. A longer one than the schema can hold becomes the longest.
pub fn proto_duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(duration).unwrap_or(prost_types::Duration { seconds: i64::MAX, nanos: 0 })
}

/// Returns the duration as the language has it. A negative one, which no server sends, becomes zero.
pub fn std_duration(duration: prost_types::Duration) -> Duration {
    Duration::try_from(duration).unwrap_or_default()
}

/// Returns 16 random bytes for a transfer key, which is a secret between the two sides.
///
/// # Panics
///
/// When the system has no random numbers.
pub fn random_key() -> [u8; 16] {
    let mut key = [0; 16];
    getrandom::fill(&mut key).expect("the system gives random numbers");
    key
}

/// Returns a text that no other client chooses.
pub(crate) fn idempotency_key() -> String {
    random_key().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Blocks {
    /// Returns the number of blocks in all groups.
    pub fn block_count(&self) -> u64 {
        let runs = self.groups.iter().filter_map(|group| group.runs.as_ref());
        runs.flat_map(|runs| &runs.counts).map(|count| u64::from(*count)).sum()
    }
}

impl GroupBlocks {
    /// Returns the block ids of one group, in token order.
    pub fn new(group: u32, ids: impl IntoIterator<Item = u32>) -> Self {
        Self { group, runs: Some(ids.into_iter().collect()) }
    }
}

impl BlockRuns {
    /// Returns the block ids, in their order.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.starts.iter().zip(&self.counts).flat_map(|(start, count)| *start..start.saturating_add(*count))
    }
}

impl FromIterator<u32> for BlockRuns {
    /// Returns block ids as maximal runs.
    fn from_iter<Ids: IntoIterator<Item = u32>>(ids: Ids) -> Self {
        let mut runs = Self::default();
        let mut next = None;
        for id in ids {
            match runs.counts.last_mut() {
                Some(count) if next == Some(id) => *count += 1,
                _ => {
                    runs.starts.push(id);
                    runs.counts.push(1);
                }
            }
            next = id.checked_add(1);
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_maximal_and_keep_the_order() {
        let runs: BlockRuns = [4, 5, 6, 2, 9, 10].into_iter().collect();
        assert_eq!((&runs.starts[..], &runs.counts[..]), (&[4, 2, 9][..], &[3, 1, 2][..]));
        assert_eq!(runs.ids().collect::<Vec<_>>(), [4, 5, 6, 2, 9, 10]);
    }

    #[test]
    fn blocks_of_all_groups_are_counted() {
        let groups = vec![GroupBlocks::new(0, 0..5), GroupBlocks::new(1, [7])];
        assert_eq!(Blocks { groups, ..Default::default() }.block_count(), 6);
    }
}
