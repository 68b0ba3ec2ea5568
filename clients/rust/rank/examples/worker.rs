//! A worker that fills and reads its pool as a line of its standard input says, until the input ends.
//!
//! ```text
//! SOCKET_PATH SECRET_HEX
//! write OFFSET LENGTH BYTE     step STEP     read OFFSET LENGTH     (answers the sum of the bytes)
//! ```

use std::error::Error;
use std::io::{self, BufRead};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvgrpc_rank::{Rank, Ticket};

fn main() -> Result<(), Box<dyn Error>> {
    let mut lines = io::stdin().lock().lines();
    let first = lines.next().ok_or("a line with the ticket is missing")??;
    let (path, secret) = first.split_once(' ').ok_or("the ticket is SOCKET_PATH SECRET_HEX")?;
    let ticket = Ticket { socket_path: path.into(), secret: unhex(secret)?, comes_back: Duration::ZERO };
    let rank = Arc::new(Rank::attach(&ticket, 0)?);
    let serving = thread::spawn({
        let rank = Arc::clone(&rank);
        move || rank.serve()
    });
    println!("attached {}", rank.memory().len());
    for line in lines {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let numbers = words[1..].iter().map(|word| word.parse()).collect::<Result<Vec<usize>, _>>()?;
        match (words[0], numbers.as_slice()) {
            ("write", &[offset, length, byte]) => {
                rank.write(offset, &vec![u8::try_from(byte)?; length]);
                println!("written");
            }
            ("read", &[offset, length]) => {
                let mut bytes = vec![0; length];
                rank.read(offset, &mut bytes);
                println!("{}", bytes.into_iter().map(u64::from).sum::<u64>());
            }
            ("step", &[step]) => {
                rank.step_done(step as u64)?;
                println!("reported");
            }
            _ => return Err(format!("no such line: {line}").into()),
        }
    }
    rank.stop();
    serving.join().expect("it does not panic")?;
    Ok(())
}

fn unhex(text: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}
