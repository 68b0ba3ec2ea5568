//! Waiting for one transfer, longer than one call may.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::Error;
use crate::client::Client;
use crate::pauses::Pauses;
use crate::v1::{Transfer, WaitCondition, WaitTransferRequest};
use crate::values::proto_duration;

/// Of one call; half of what a server allows, so that proxies with a limit of a minute let it pass.
const ONE_WAIT: Duration = Duration::from_secs(30);

/// What came of a wait.
#[derive(Clone, Debug, PartialEq)]
pub struct Waited {
    /// The transfer as it is.
    pub transfer: Transfer,
    /// The condition was met; else the time was over.
    pub condition_met: bool,
}

impl Client {
    /// Waits until the transfer is over, or (RETURNED) its memory is returned too, however it ended, or until the time is
    /// over. A server that is away or full for a while does not end it, nor does a proxy that fails.
    ///
    /// # Errors
    ///
    /// NOT_FOUND TRANSFER_NOT_FOUND: its memory counts as QUARANTINED. The last error, when the time was over before the
    /// server was back.
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
                // The server's own limit may be shorter than the wait that was asked for.
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
