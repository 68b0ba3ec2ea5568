//! Waits for one transfer, for longer than one call may.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::Error;
use crate::client::Client;
use crate::pauses::Pauses;
use crate::v1::{Transfer, WaitCondition, WaitTransferRequest};
use crate::values::proto_duration;

/// Wait of one call: half of what a server allows, so that proxies with a limit of one minute let it pass.
const ONE_WAIT: Duration = Duration::from_secs(30);

/// The result of a wait.
#[derive(Clone, Debug, PartialEq)]
pub struct Waited {
    /// The transfer in its current state.
    pub transfer: Transfer,
    /// Whether the condition was met. If not, the time was over.
    pub condition_met: bool,
}

impl Client {
    /// Waits until the transfer is over (ENDED), until its memory is returned as well (RETURNED), or until the time is
    /// over. The outcome of the transfer does not matter. A server that is away or full for a while does not end the
    /// wait, and neither does a proxy that fails.
    ///
    /// # Errors
    ///
    /// NOT_FOUND TRANSFER_NOT_FOUND: the memory counts as QUARANTINED. The last error, when the time was over before
    /// the server was back.
    pub async fn wait(
        &self,
        transfer_id: impl Into<String>,
        until: WaitCondition,
        timeout: Duration,
    ) -> Result<Waited, Error> {
        let transfer_id = transfer_id.into();
        let end = Instant::now() + timeout;
        let mut pauses = Pauses::new(Duration::from_millis(100), Duration::from_secs(2));
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let request = WaitTransferRequest {
                transfer_id: transfer_id.clone(),
                until: until.into(),
                timeout: Some(proto_duration(left.min(ONE_WAIT))),
                layers: None,
            };
            let asked = Instant::now();
            match self.transfers().wait_transfer(request).await.map(tonic::Response::into_inner).map_err(Error::from) {
                Ok(reply) if reply.condition_met || Instant::now() >= end => {
                    let (transfer, condition_met) = (reply.transfer.unwrap_or_default(), reply.condition_met);
                    return Ok(Waited { transfer, condition_met });
                }
                // The server's own limit may be shorter than the requested wait.
                Ok(_) if asked.elapsed() >= Duration::from_secs(1) => pauses.start_over(),
                Ok(_) => sleep(pauses.next().min(left)).await,
                Err(error) if error.is_passing() && Instant::now() < end => {
                    let pause = pauses.next().max(error.retry_delay().unwrap_or_default());
                    sleep(pause.min(end.saturating_duration_since(Instant::now()))).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}
