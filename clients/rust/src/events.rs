//! The events of a loop in the background.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Largest number of unread events. Beyond it, the loop waits for the reader, and the server for the loop.
const UNREAD: usize = 16;

/// The events of a loop in the background, in order. Dropping it ends the loop.
#[derive(Debug)]
pub struct Events<T> {
    unread: mpsc::Receiver<T>,
    task: JoinHandle<()>,
}

impl<T: Send + 'static> Events<T> {
    /// Starts the loop in the current Tokio runtime.
    pub(crate) fn of<Run: Future<Output = ()> + Send + 'static>(run: impl FnOnce(mpsc::Sender<T>) -> Run) -> Self {
        let (sender, unread) = mpsc::channel(UNREAD);
        Self { unread, task: tokio::spawn(run(sender)) }
    }
}

impl<T> Events<T> {
    /// Returns the next event; None after the end. Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<T> {
        self.unread.recv().await
    }
}

impl<T> Stream for Events<T> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        self.unread.poll_recv(context)
    }
}

impl<T> Drop for Events<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}
