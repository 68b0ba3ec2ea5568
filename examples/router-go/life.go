package main

import (
	"context"
	"errors"
	"time"
)

var errLifeOver = errors.New("the engine has ended, or has started over")

// life is one life of an engine, from one incarnation to the next. A wait at its lead ends within the life, or never.
type life struct {
	incarnation uint64
	over        context.Context
	end         context.CancelCauseFunc
	grace       *time.Timer // runs while the engine cannot be reached
}

// confirm returns the engine's life with this incarnation. It ends an earlier life.
func (l *life) confirm(incarnation uint64) *life {
	if l != nil && l.grace != nil {
		l.grace.Stop()
	}
	if l != nil && l.incarnation == incarnation && l.over.Err() == nil {
		return l
	}
	if l != nil {
		l.end(errLifeOver)
	}
	over, end := context.WithCancelCause(context.Background())
	return &life{incarnation: incarnation, over: over, end: end}
}

// doubt ends the life unless it is confirmed within the grace.
func (l *life) doubt(grace time.Duration) {
	if l == nil {
		return
	}
	if l.grace != nil {
		l.grace.Stop()
	}
	l.grace = time.AfterFunc(grace, func() { l.end(errLifeOver) })
}

// within returns a context that also ends with the engine's life, then with errLifeOver.
func (e *engine) within(ctx context.Context) (context.Context, context.CancelFunc) {
	e.mu.Lock()
	life := e.life
	e.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	if life == nil {
		return ctx, func() { cancel(nil) }
	}
	stop := context.AfterFunc(life.over, func() { cancel(context.Cause(life.over)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// incarnation returns the incarnation of an engine, 0 where none is known.
func (e *engine) incarnation() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.life == nil {
		return 0
	}
	return e.life.incarnation
}
