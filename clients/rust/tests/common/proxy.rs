//! A TCP proxy whose connections can be cut.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::task::JoinHandle;

pub struct Proxy {
    pub address: SocketAddr,
    cut: broadcast::Sender<()>,
    refuses: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Proxy {
    pub async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (cut, _) = broadcast::channel::<()>(1);
        let refuses = Arc::new(AtomicBool::new(false));
        let (cuts, refusing) = (cut.clone(), Arc::clone(&refuses));
        let task = tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                if refusing.load(Ordering::SeqCst) {
                    continue; // closed at once
                }
                let mut cut = cuts.subscribe();
                tokio::spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(target).await {
                        tokio::select! {
                            _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                            _ = cut.recv() => {}
                        }
                    }
                });
            }
        });
        Self { address, cut, refuses, task }
    }

    /// Ends every open connection.
    pub fn cut(&self) {
        let _ = self.cut.send(());
    }

    /// Sets whether new connections end at once.
    pub fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        self.task.abort();
    }
}
